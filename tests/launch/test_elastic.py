"""What launch/elastic.py refuses. tests/hosts/test_elastic.py has its runs."""

import sys

import pytest

from launch.elastic import main

OPTIONS = ["--ranks-per-host", "1", "--rendezvous", "login:29400", "--config", "configs/pretrain/smoke.yaml"]


def test_a_range_with_a_number_of_ranks_that_does_not_divide_the_batch_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["elastic.py", "--hosts", "2:4", *OPTIONS, "engine.kind=fsdp2"])
    assert main() == 2
    wanted = "found 4; 3 ranks x micro_batch_size must divide train.global_batch_size = 8"
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("bounds", ["0:4", "4:2", "few"])
def test_bounds_that_are_none_are_refused(bounds, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["elastic.py", "--hosts", bounds, *OPTIONS])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and f"--hosts: found {bounds}; needed: two numbers" in capsys.readouterr().err
