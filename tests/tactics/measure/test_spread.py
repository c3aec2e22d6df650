"""What is checked of a cluster before anything is raced on it. Ray itself: tests/servers/test_ray_build.py."""

import socket
from dataclasses import replace

import pytest

from cuda_kernels.compile import source_hash
from cuda_kernels.device import named
from tactics.measure import spread
from tactics.measure.spread import Found, agreed

H200, L4 = (replace(named(name), measured=True) for name in ("h200", "l4"))
FOUND = Found(H200, "580", source_hash())


def test_gpus_of_one_kind_leave_out_what_failed_on_any():
    failed = [(("move", "wrong"),), (), (("pool", "hangs"), ("move", "wrong"))]
    found = agreed([replace(FOUND, device=replace(H200, left_out=rows)) for rows in failed])
    assert found == replace(FOUND, device=replace(H200, left_out=(("move", "wrong"), ("pool", "hangs"))))


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([replace(FOUND, device=L4)], "2 NVIDIA H200 (driver 580), 1 NVIDIA L4 (driver 580): one build for each"),
        ([replace(FOUND, driver="570")], "1 NVIDIA H200 (driver 570), 2 NVIDIA H200 (driver 580): one build for each"),
        ([replace(FOUND, source="other")], "a node has other kernels than this machine: install the same gpu_runtime"),
    ],
)
def test_gpus_of_two_kinds_share_no_build(others, text):
    with pytest.raises(ValueError) as refused:
        agreed([FOUND, *others, FOUND])
    assert text in str(refused.value).replace(H200.title, "NVIDIA H200").replace(L4.title, "NVIDIA L4")


@pytest.mark.parametrize("address", ["head", "head:", "head:x", "head:0", "head:65536", "ray://head", ":"])
def test_an_address_names_a_port(address):
    with pytest.raises(ValueError, match="expected the address of a Ray cluster, as head:6379 or ray://head:10001, got"):
        spread._knock(address)


def test_an_address_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(spread, "ANSWER_S", 0.3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ValueError, match=rf"no Ray cluster answers at 127.0.0.1:{port}: \d+ connections failed within 0 s"):
            spread._knock(f"127.0.0.1:{port}")
        free.listen()
        spread._knock(f"127.0.0.1:{port}")
        spread._knock(f"ray://127.0.0.1:{port}")
    assert [spread._knock(address) for address in ("", "auto", "local")] == [None] * 3
