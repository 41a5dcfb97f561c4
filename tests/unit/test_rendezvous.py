"""How the workers of TF_CONFIG find each other, without Horovod's own part."""

import http.client
import json
import pathlib
import queue
import re
import socket
import threading
import time

import pytest

from epl.errors import ClusterError
from epl.runtime import network
from epl.runtime import rendezvous as module
from epl.runtime.gloo import GlooStore, Slot, assign_slots, slot_environment
from epl.runtime.rendezvous import Claim, Rendezvous, Roll, digest_of, timeout_seconds

pytest.importorskip("horovod.runner.http.http_server")
pytestmark = pytest.mark.timeout(60)
ROOT = pathlib.Path(__file__).resolve().parents[2]
HOSTS = ["a:1", "b:2", "c:3"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(module, "FAREWELL_SECONDS", 0.7)
    monkeypatch.setattr(module, "TAKEN_SECONDS", 0.6)
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def hello(roll, index, nonce, hosts=HOSTS):
    return roll.hello({"index": index, "nonce": nonce, "process": "host x, process %s" % nonce, "digest": digest_of(hosts), "hosts": hosts})


def roll():
    return Roll(HOSTS, Claim("n0", "host x, process n0"))


def join(hosts, indices, timeout=10.0):
    """Join as several workers at once; the variables or the error of each."""
    results = [None] * len(indices)

    def run(place, index):
        try:
            worker = Rendezvous(hosts, index, timeout)
            results[place] = worker.join()
            time.sleep(0.3)
            worker.stop()
        except ClusterError as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(indices)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def test_slots_on_unequal_machines():
    slots = assign_slots(["m", "n", "m", "m"])
    assert slots == [Slot("m", 0, 4, 0, 3, 0, 2), Slot("n", 1, 4, 0, 1, 1, 2), Slot("m", 2, 4, 1, 3, 0, 1), Slot("m", 3, 4, 2, 3, 0, 1)]
    variables = slot_environment(slots[2], "10.0.0.1", 99, "eth7")
    assert variables["HOROVOD_RANK"] == "2" and variables["HOROVOD_LOCAL_SIZE"] == "3" and variables["HOROVOD_GLOO_IFACE"] == "eth7"
    assert (variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"], variables["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("10.0.0.1", "99")


def test_the_roll_is_complete_when_all_have_said_hello():
    book = roll()
    assert hello(book, 1, "n1")["state"] == "wait" and book.missing() == [2]
    assert hello(book, 2, "n2")["state"] == "ready"
    assert hello(book, 1, "n1") == {"state": "ready", "missing": [], "server": "n0"}


def test_two_living_claims_to_one_index_refuse_the_job():
    book = roll()
    hello(book, 1, "n1")
    assert hello(book, 1, "other")["state"] == "wait"  # n1 may have been restarted
    answer = hello(book, 1, "n1")
    assert answer["state"] == "refused"
    for text in ("worker 1 (b:2)", "process n1", "process other", "TF_CONFIG['task']['index']"):
        assert text in answer["error"]
    assert hello(book, 2, "n2")["state"] == "refused"


def test_a_restarted_worker_takes_its_place_again():
    book = roll()
    hello(book, 1, "n1")
    for _ in range(3):
        assert hello(book, 1, "again")["state"] == "wait"
    assert hello(book, 2, "n2")["state"] == "ready"


def test_nobody_takes_the_place_of_worker_0_or_in_a_running_job():
    book = roll()
    assert hello(book, 0, "other")["state"] == "refused"
    book = roll()
    hello(book, 1, "n1"), hello(book, 2, "n2")
    assert hello(book, 1, "late")["state"] == "taken"
    assert hello(book, 1, "n1")["state"] == "ready"


def test_another_list_of_workers_is_refused():
    answer = hello(roll(), 1, "n1", ["a:1", "b:2"])
    assert answer["state"] == "refused" and "a:1, b:2 instead of a:1, b:2, c:3" in answer["error"]


def test_workers_meet_and_get_the_variables_of_horovod(capfd):
    ports = free_ports(3)
    hosts = ["127.0.0.1:%d" % ports[0], "localhost:%d" % ports[1], "127.0.0.1:%d" % ports[2]]
    found = join(hosts, [2, 0, 1])
    assert [one["HOROVOD_RANK"] for one in found] == ["2", "0", "1"]
    assert [one["HOROVOD_LOCAL_RANK"] for one in found] == ["1", "0", "0"]
    assert {one["HOROVOD_GLOO_RENDEZVOUS_PORT"] for one in found} == {str(ports[0])}
    assert {one["HOROVOD_CONTROLLER"] for one in found} == {"gloo"}
    assert "rendezvous of 3 workers at 127.0.0.1:%d, over the interface lo (127.0.0.1)" % ports[0] in capfd.readouterr().err


def test_workers_that_meet_watch_over_each_other(capfd):
    hosts = ["127.0.0.1:%d" % port for port in free_ports(3)]
    workers = [Rendezvous(hosts, index, 10.0, stall_timeout=20.0) for index in range(3)]
    ends = queue.Queue()
    threads = []
    for worker in workers:
        worker.vigil._end = ends.put
        threads.append(threading.Thread(target=worker.join, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    workers[2].stop()
    assert [ends.get(timeout=5) for _ in range(2)] == [70, 70]
    for worker in workers:
        worker.stop()
    printed = capfd.readouterr().err
    for rank in (0, 1):
        line = r"epl: rank %d: the job is broken: rank 2 \(%s, host .*, process \d+\) died while Horovod started"
        assert re.search(line % (rank, hosts[2]), printed)


def test_a_worker_that_leaves_before_all_have_met_is_missing_again(capfd, monkeypatch):
    monkeypatch.setattr(module, "REPORT_SECONDS", 0.4)
    hosts = ["127.0.0.1:%d" % port for port in free_ports(3)]
    leaving = Rendezvous(hosts, 1, 1.5, stall_timeout=20.0)
    errors = []
    thread = threading.Thread(target=lambda: errors.append(pytest.raises(ClusterError, leaving.join)), daemon=True)
    thread.start()
    first = Rendezvous(hosts, 0, 4.0, stall_timeout=20.0)
    errors.append(pytest.raises(ClusterError, first.join))
    thread.join(10)
    assert "still waiting for 1 of 3 workers: 2 (%s)" % hosts[2] in str(errors[0].value)
    assert "still waiting for 2 of 3 workers: 1 (%s, which was there and has ended), 2 (%s)" % (hosts[1], hosts[2]) in str(errors[1].value)
    assert "the job is broken" not in capfd.readouterr().err


@pytest.mark.parametrize("indices", [[0, 0], [0, 1, 1]])
def test_duplicates_are_named_on_both_sides_quickly(indices):
    hosts = ["127.0.0.1:%d" % port for port in free_ports(3)]
    start = time.monotonic()
    errors = join(hosts, indices)
    assert time.monotonic() - start < 10
    for error in errors:
        assert isinstance(error, ClusterError)
        assert "two processes claim to be worker %d (%s)" % (indices[-1], hosts[indices[-1]]) in str(error)


def test_a_missing_worker_is_named_while_waiting_and_at_the_end(capfd, monkeypatch):
    monkeypatch.setattr(module, "REPORT_SECONDS", 0.4)
    hosts = ["127.0.0.1:%d" % port for port in free_ports(3)]
    first, second = join(hosts, [0, 2], timeout=1.5)
    missing = "still waiting for 1 of 3 workers: 1 (%s)" % hosts[1]
    assert missing in str(first) and "EPL_RENDEZVOUS_TIMEOUT" in str(first)
    assert isinstance(second, ClusterError)
    for error in (first, second):
        for hint in ("HOROVOD_GLOO_IFACE=NAME", "--mca btl_tcp_if_include NAME", "this machine has %s" % network.describe_interfaces()):
            assert hint in str(error)
    printed = capfd.readouterr().err
    assert "epl: rank 0: " + missing in printed and "epl: rank 2: " + missing in printed


def test_the_guide_says_how_to_choose_an_interface():
    guide = (ROOT / "docs" / "en" / "launch.md").read_text(encoding="utf-8")
    for text in ("HOROVOD_GLOO_IFACE=", "--mca btl_tcp_if_include ", "--mca oob_tcp_if_include ", "NCCL_SOCKET_IFNAME="):
        assert text in guide


def test_a_missing_worker_0_is_named_by_the_others():
    hosts = ["127.0.0.1:%d" % port for port in free_ports(2)]
    (error,) = join(hosts, [1], timeout=1.0)
    assert "1 of 2 workers: 0 (%s)" % hosts[0] in str(error) and "does not answer" in str(error)


@pytest.mark.parametrize("index", [0, 1])
def test_an_unresolvable_host_is_named_at_once(index, capfd):
    hosts = ["127.0.0.1:%d" % free_ports(1)[0], "no-such-host.invalid:7002"]
    if index == 1:
        hosts.reverse()
    (error,) = join(hosts, [index], timeout=1.0)
    assert "no-such-host.invalid" in str(error) and "can't be resolved" in str(error)
    assert "the host 'no-such-host.invalid' can't be resolved" in capfd.readouterr().err


def test_a_port_in_use_by_another_program_is_said():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        hosts = ["127.0.0.1:%d" % other.getsockname()[1], "127.0.0.1:1"]
        closing = threading.Timer(0.0, lambda: [other.accept()[0].close() for _ in range(50)])
        closing.daemon = True
        closing.start()
        (error,) = join(hosts, [0])
    assert "can't listen at %s" % hosts[0] in str(error) and "another program has the port" in str(error)


def test_worker_0_without_port_is_refused():
    with pytest.raises(ClusterError, match="has no port"):
        Rendezvous(["10.0.0.1", "10.0.0.2"], 1, 1.0)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_a_bad_timeout_is_refused(text):
    with pytest.raises(ClusterError, match="EPL_RENDEZVOUS_TIMEOUT"):
        timeout_seconds({"EPL_RENDEZVOUS_TIMEOUT": text})


def test_the_timeout_comes_from_the_environment():
    assert timeout_seconds({}) == 300.0 and timeout_seconds({"EPL_RENDEZVOUS_TIMEOUT": "12.5"}) == 12.5


def test_the_store_serves_horovod_and_survives_nonsense():
    store = GlooStore("127.0.0.1", 0, assign_slots(["m", "m"]), lambda message: {"got": message["index"]})
    store.start()

    def ask(method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", store.port, timeout=5)
        connection.request(method, path, body)
        response = connection.getresponse()
        try:
            return response.status, response.read()
        finally:
            connection.close()

    try:
        assert ask("GET", "/global/key")[0] == 404
        assert ask("PUT", "/global/key", b"\x00value")[0] == 200
        assert ask("GET", "/global/key") == (200, b"\x00value")
        assert ask("POST", GlooStore.HELLO, json.dumps({"index": 4}).encode()) == (200, b'{"got": 4}')
        for body in (b"", b"not JSON", b"[]", b"{}", b"\xff"):
            assert ask("POST", GlooStore.HELLO, body)[0] == 400
        assert ask("POST", "/other", b"{}")[0] == 404
    finally:
        store.stop()
