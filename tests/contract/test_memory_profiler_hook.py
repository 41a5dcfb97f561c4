import os

import epl
from epl.profiler.memory_profiler_hook import MemoryProfilerHook
from tests.contract.models import m4, minimize, run


def test_files(gpus, tmp_path):
    gpus(1)
    epl.init()
    with epl.replicate(1):
        loss = m4()
    hook = MemoryProfilerHook(save_steps=2, max_steps=4, output_dir=str(tmp_path), dump_metadata=True, visualize=False)
    assert len(run(minimize(loss), 10, hooks=[hook])) == 10
    assert sorted(os.listdir(str(tmp_path))) == ["run_metadata_2.bin", "run_metadata_4.bin"]
