"""What TF_CONFIG may not be; what it may be is in test_cluster.py."""

import pytest

from epl.cluster.tf_config import parse_tf_config
from epl.errors import ClusterError

REFUSED_TF_CONFIGS = {
    "not_json": ("{cluster: 1}", "TF_CONFIG is not JSON"),
    "list": ("[]", "TF_CONFIG is []; expected a JSON object"),
    "cluster_list": ('{"cluster": ["h:1"]}', "TF_CONFIG['cluster'] is ['h:1']; expected a JSON object"),
    "unknown_job": ('{"cluster": {"workers": ["h:1"]}}', "names the job 'workers'; expected one of chief, worker, ps, evaluator"),
    "text_for_list": ('{"cluster": {"worker": "h:1"}}', "TF_CONFIG['cluster']['worker'] is 'h:1'; expected a list of addresses"),
    "comma": ('{"cluster": {"worker": ["h:1,h:2"]}}', "has blanks or commas in it; write one address per entry"),
    "empty_address": ('{"cluster": {"worker": ["h:1", ""]}}', "TF_CONFIG['cluster']['worker'][1] is ''; expected an address"),
    "two_chiefs": ('{"cluster": {"chief": ["h:1", "h:2"]}}', "has 2 addresses; a job has one chief"),
    "chief_and_master": ('{"cluster": {"chief": ["h:1"], "master": ["h:2"]}}', "two names of one job; keep 'chief'"),
    "duplicate": (
        '{"cluster": {"worker": ["h:1", "h:1"]}, "task": {"type": "worker", "index": 0}}',
        "the address 'h:1' stands twice, as worker 0 and as worker 1; give every process an address of its own",
    ),
    "duplicate_over_jobs": ('{"cluster": {"chief": ["h:1"], "ps": ["h:1"]}}', "stands twice, as chief 0 and as ps 0"),
    "no_task": ('{"cluster": {"worker": ["h:1", "h:2"]}}', 'TF_CONFIG has 2 workers but no "task"; add "task"'),
    "no_type": ('{"cluster": {"worker": ["h:1"]}, "task": {"index": 0}}', "TF_CONFIG['task']['type'] is None; expected one of"),
    "unknown_type": ('{"cluster": {"worker": ["h:1"]}, "task": {"type": "boss", "index": 0}}', "names the job 'boss'"),
    "no_index": ('{"cluster": {"worker": ["h:1"]}, "task": {"type": "worker"}}', "TF_CONFIG['task']['index'] is None; expected a number from 0"),
    "negative_index": ('{"cluster": {"worker": ["h:1"]}, "task": {"type": "worker", "index": -1}}', "is -1; expected a number from 0"),
    "bool_index": ('{"cluster": {"worker": ["h:1"]}, "task": {"type": "worker", "index": true}}', "is True; expected a number from 0"),
    "index_too_big": (
        '{"cluster": {"worker": ["h:1", "h:2"]}, "task": {"type": "worker", "index": 2}}',
        "TF_CONFIG['task'] is worker 2, but TF_CONFIG['cluster'] has 2 addresses of that job; expected 0 to 1",
    ),
    "no_such_job": ('{"cluster": {"worker": ["h:1"]}, "task": {"type": "ps", "index": 0}}', "has 0 addresses of that job; add the job to"),
    "no_hosts": ('{"task": {"type": "worker", "index": 1}}', "TF_CONFIG['task'] is worker 1, but TF_CONFIG['cluster'] names no hosts"),
    "evaluator_index": (
        '{"cluster": {"worker": ["h:1"], "evaluator": ["e:1"]}, "task": {"type": "evaluator", "index": 1}}',
        "TF_CONFIG['task'] is evaluator 1, but TF_CONFIG['cluster'] has 1 addresses of that job; expected 0 to 0",
    ),
}


@pytest.mark.parametrize("text,message", REFUSED_TF_CONFIGS.values(), ids=REFUSED_TF_CONFIGS)
def test_refused_tf_config(text, message):
    with pytest.raises(ClusterError) as caught:
        parse_tf_config(text)
    assert message in str(caught.value)
