"""What is asked of a cluster's API, call by call: its words, its lease, its ways in. Without trials."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from steno_rollouts.trials.containers.launcher import Launcher
from steno_rollouts.trials.harbor.driver import __file__ as driver
from steno_rollouts.trials.harbor.kubernetes import fleet as kubernetes_fleet
from steno_rollouts.trials.harbor.kubernetes.fleet import GONE_S, Fleet
from steno_rollouts.trials.harbor.kubernetes.options import KubernetesOptions
from steno_rollouts.trials.harbor.kubernetes.pods import shell
from steno_rollouts.trials.harbor.kubernetes.pods.heartbeats import RENEWED
from tests.integration.harbor.conftest import PYTHON
from tests.integration.harbor.kubernetes.answers import Fault
from tests.integration.harbor.kubernetes.cluster import NAMESPACE, TOKEN, Cluster
from tests.support.certificates import certificate
from tests.support.waiting import until

pytestmark = pytest.mark.harbor

HERE = Path(__file__).parent
PODS = Path(driver).with_name("kubernetes") / "pods"
LEASE_S = 18.0
"""Of launchers here."""


@pytest.fixture(autouse=True)
def time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a keeper that is told to end: its last word is that its lease is over."""
    monkeypatch.setattr(kubernetes_fleet, "END_S", 60.0)


def test_what_the_api_says_is_told_in_its_words(cluster: Cluster) -> None:
    forbidden = 'pods "forbidden-pod" is forbidden: User "u" cannot get resource "pods" in API group ""'
    quota = 'pods "quota-pod" is forbidden: exceeded quota: sandboxes'
    cluster.faults += [
        Fault("GET", "forbidden-pod", "refuse", status=403, words=forbidden),
        Fault("GET", "busy-pod", "refuse", status=429, times=99),
        Fault("GET", "slow-pod", "slow", seconds=60.0, times=99),
        Fault("GET", "lost-pod", "lose"),
        Fault("GET", "quota-pod", "refuse", status=403, words=quota),
    ]
    done = subprocess.run(
        [PYTHON, "-I", HERE / "probe.py", PODS, cluster.config], capture_output=True, text=True, timeout=120
    )
    said = dict(json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    refused = "ApiRefused: the cluster refuses to get pods: "
    assert said["forbidden"] == f"{refused}{forbidden} (403) (docs/kubernetes.md says which rights are needed)"
    assert said["quota"] == f"{refused}{quota} (403)".replace("ApiRefused", "QuotaExceeded")
    assert said["busy"] == "ApiUnavailable: the cluster can't be asked to get pods, for 2 s: told to (429)"
    assert said["slow"].startswith("ApiUnavailable:") and "TimeoutError" in said["slow"]
    assert said["lost"].startswith("NotThere:"), "asked again"
    assert said["elsewhere"].startswith("ApiRefused: no cluster is known here")
    assert said["not-mine"].startswith("ApiRefused: the cluster refuses to list pods: no namespace not-mine (403)")
    assert sys.executable != PYTHON


async def test_what_a_launcher_has_left_is_ended_and_nothing_of_one_that_lives(cluster: Cluster) -> None:
    """Whose lease is renewed lives, on whatever machine; whoever claims a trial ends all its pods."""
    here, first, second, gone = (replace(Launcher.here(), place=place) for place in ("here", "one", "two", "elsewhere"))
    one, two = launched(cluster, first), launched(cluster, second)
    try:
        await one.begun()
        cluster.plant("of-one", mark("t-1", first.name))
        cluster.plant("taken-over", mark("t-2", first.name))
        cluster.plant("of-none", mark("t-3", gone.name))
        await two.begun()
        cluster.plant("of-two", mark("t-1", second.name))
        assert len(cluster.leases) == 2 and cluster.invalid == []
        await two.clear("t-1", wait=False)
        assert set(cluster.pods) - {"of-none"} == {"of-one", "taken-over"}, "its own alone"
        await two.clear("t-2", wait=True)
        assert set(cluster.pods) - {"of-none"} == {"of-one"}, "it was claimed"
        await until(lambda: set(cluster.pods) == {"of-one"}, within_s=180)
        looked = looks(cluster)
        await until(lambda: looks(cluster) > looked + 3 * (RENEWED + 1), within_s=180)
        assert set(cluster.pods) == {"of-one"}, "it lives"
        cluster.plant("of-the-dead", mark("t-4", replace(here, began="earlier").name))
        three = launched(cluster, here)
        try:
            await three.begun()
            assert set(cluster.pods) == {"of-one"}, "this machine's are known at once"
        finally:
            three.close()
        one.close()
        await until(lambda: cluster.pods == {}, within_s=180)
    finally:
        one.close()
        two.close()
    assert cluster.leases == {}


async def test_a_keeper_that_was_killed_is_started_again_and_its_lease_goes_on(cluster: Cluster) -> None:
    fleet = launched(cluster, Launcher.here())
    try:
        await fleet.begun()
        [lease] = cluster.leases.values()
        earlier = looks(cluster)
        assert fleet._process is not None
        fleet._process.kill()
        await until(lambda: looks(cluster) > earlier + 2, within_s=180)
        [later] = cluster.leases.values()
        assert later["metadata"]["uid"] == lease["metadata"]["uid"], "it was not let go"
        assert later["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"]
        cluster.plant("left", mark("t-1", Launcher.here().name))
        await fleet.clear("t-1", wait=True)
        assert cluster.pods == {}
    finally:
        fleet.close()


async def test_a_pod_on_a_lost_node_is_not_waited_for_without_an_end(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = launched(cluster, Launcher.here(), gone_s=1.0)
    try:
        await fleet.begun()
        cluster.plant("lost", mark("t-1", "another"))
        cluster.plant("other", mark("t-1", "another"))
        cluster.lost = {"lost"}
        assert await fleet.clear("t-1", wait=True) == ["lost"]
        assert set(cluster.pods) == {"lost"} and "deletionTimestamp" in cluster.pods["lost"]["metadata"]
        assert "t-1: pod lost was deleted and is not gone after 1 s" in caplog.text
        assert await fleet.clear("t-1", wait=False) == []
    finally:
        fleet.close()


def test_nothing_is_kept_of_pods_that_are_gone_in_whatever_order_the_cluster_tells_it() -> None:
    """Of each pod of a launcher's life a file and its state, else."""
    done = subprocess.run([PYTHON, HERE / "forgetting.py", PODS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == 4
    for order, *found in said:
        assert found == [["steno-1.json"], [], [], ["steno-2.json"]], order


def launched(cluster: Cluster, launcher: Launcher, gone_s: float = GONE_S) -> Fleet:
    options = KubernetesOptions.of({"kubeconfig": str(cluster.config)})
    return Fleet(Path(PYTHON), options, "run", launcher, LEASE_S, gone_s)


def mark(trial: str, launcher: str) -> dict[str, str]:
    return {"steno.run": "run", "steno.trial": trial, "steno.launcher": launcher}


def looks(cluster: Cluster) -> int:
    return sum("/leases?" in body for body in cluster.bodies)


def test_in_a_pod_the_cluster_is_found_by_what_every_pod_is_given(cluster: Cluster, tmp_path: Path) -> None:
    """The folder of a ServiceAccount, in a mount namespace of its own; the API answers over TLS."""
    account, private = tmp_path / "account", tmp_path / "key.pem"
    account.mkdir()
    certificate(account / "ca.crt", private)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(account / "ca.crt", private)
    (account / "token").write_text(TOKEN)
    (account / "namespace").write_text(NAMESPACE)
    (tmp_path / "secure").mkdir()
    place = "/run/secrets/kubernetes.io/serviceaccount"
    laid = f'mount -t tmpfs none /run && mkdir -p {place} && cp "$0"/* {place} && exec "$@"'
    with Cluster(tmp_path / "secure", "", tls=tls).running() as found:
        environment = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(found.port),
            "PATH": "/bin:/usr/bin:/sbin",
        }
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", laid, account, PYTHON, "-I", HERE / "probe.py", PODS],
            capture_output=True, text=True, timeout=120, env=environment,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["inside", f"0 pods in {NAMESPACE}"]


@pytest.mark.parametrize("user", ["nobody", "65534"])
def test_a_command_runs_as_another_user_by_name_or_number(user: str) -> None:
    """In this machine's shell, which has `su`; the small image of the pods has none."""
    lines = shell.script('id -un; printf "%s\\n" "$WORD"; cat', env={"WORD": "it's $HOME"}, user=user)
    done = subprocess.run(["sh", "-c", shell.BOOT], input=lines + b"more", capture_output=True, timeout=60, cwd="/")
    assert (done.stdout, done.returncode) == (b"nobody\nit's $HOME\n", 0), done.stderr
