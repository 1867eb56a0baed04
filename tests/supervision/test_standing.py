"""What a lane answers instead of serving, and what a strike tells its caller."""

from __future__ import annotations

import asyncio
import logging

import pytest

from synapse_host.errors import EngineCrashed, LaneRefused, ProbeRequired, QueueFull
from synapse_host.supervision.standing import Standing
from synapse_host.worker.exchange import Exchange
from synapse_host.worker.process import Death
from tests.support.lanes import embed, lane


def standing(kind: str = "catalog", lane_id: str = "toy") -> Standing:
    return Standing(lane(kind=kind, lane_id=lane_id), cool_down=600.0)


def death(generation: int, **changes) -> Death:
    told = {"cause": "exit", "message": "it ended", "pid": 7, "exit_status": None, "signal": "SIGABRT"}
    return Death(generation=generation, **{**told, "log_tail": "last words", "reaped": True, **changes})


def exchange(first: int) -> Exchange:
    request, payload = embed([first])("1-1", "m")
    return Exchange(request, payload, asyncio.get_running_loop().create_future(), "embed_batch")


def shut(lane_standing: Standing, *, ids: tuple[int, int] = (1, 1)) -> None:
    for generation, first in enumerate(ids, 1):
        lane_standing.charge(death(generation), "embed_batch", exchange(first))


async def test_a_strike_tells_its_caller_everything():
    one = standing()
    error = one.charge(death(1), "embed_batch", exchange(1))
    assert error is one.last_crash and error.message == "lane toy: it ended (SIGABRT)"
    assert error.retry_after_ms == 250 and not error.quarantined and "same_input" not in error.details
    assert (error.details["cause"], error.details["log_tail"]) == ("exit", "last words")
    one.admit()
    second = one.charge(death(2), "embed_batch", exchange(1))
    assert second.quarantined and second.details["same_input"] and second.retry_after_ms == 600_000
    idle = standing().charge(death(1), "idle", None)
    assert idle.details["fingerprint"] is None


@pytest.mark.parametrize(("ids", "lane_id", "matrix_lane"), [((1, 1), "toy", "toy"), ((1, 2), "embed:m", "embed")])
async def test_a_quarantine_says_why_for_how_long_where_to_look_and_what_clears_it(ids, lane_id, matrix_lane):
    one = standing(lane_id=lane_id)
    shut(one, ids=ids)
    with pytest.raises(EngineCrashed) as caught:
        one.admit()
    message = caught.value.message
    assert message.startswith(f"lane {lane_id} is quarantined for another 600 s: its worker died twice in a row")
    assert "it ended (SIGABRT)" in message
    # Each reader is told what can be done from where he is; a command that ends with its own host has nothing to clear.
    assert message.endswith(f"Clear it: await host.unload('m', lane='{lane_id}').")
    told = f"See: synapse logs {lane_id}. Clear it: synapse unload m --lane {matrix_lane}."
    assert caught.value.said("operator").endswith(told)
    assert caught.value.said("command").endswith(").")
    assert ("; the same input both times, fingerprint " in message) is (ids[0] == ids[1])
    assert caught.value.details == {"lane_id": lane_id, "quarantined": True}


async def test_a_legacy_lane_names_its_only_ways_out():
    one = standing("legacy")
    shut(one)
    for change in (lambda: None, one.clear, one.reopen):
        change()
        with pytest.raises(ProbeRequired, match=r"until it is probed or a new host starts") as caught:
            one.admit()
        assert "await host.probe('toy')" in caught.value.message
        assert caught.value.said("operator").endswith("See: synapse logs toy. Clear it: synapse probe toy.")
    one.admit(probing=True)
    one.quarantine.probed()
    one.admit()


@pytest.mark.parametrize(("kind", "seconds"), [("catalog", "600"), ("legacy", "until it is probed")])
async def test_a_quarantine_is_logged_once(kind, seconds, caplog):
    one = standing(kind, "embed:m")
    with caplog.at_level(logging.WARNING):
        for generation in (1, 2, 3):  # the third in a probe of the shut lane
            one.charge(death(generation), "embed_batch", exchange(generation))
    said = f"lane quarantined: lane=embed:m model=m seconds={seconds} reason=embed_batch: it ended (SIGABRT)"
    assert [record.getMessage() for record in caplog.records] == [said]
    one.quarantine.probed()
    with caplog.at_level(logging.WARNING):
        for generation in (4, 5):
            one.charge(death(generation), "embed_batch", exchange(generation))
    assert len(caplog.records) == 2


async def test_clear_and_reopen():
    one = standing()
    one.charge(death(1), "embed_batch", None)
    one.reopen()
    assert one.quarantine.strikes(0.0) == 1, "a reload of an open lane forgives nothing"
    one.charge(death(2), "embed_batch", None)
    one.reopen()
    one.admit()
    one.refusal = LaneRefused("not the worker", details={"reason": "engine"})
    with pytest.raises(LaneRefused) as caught:
        one.admit()
    assert caught.value is not one.refusal and caught.value.details == {"reason": "engine"}
    one.admit(probing=True)
    one.clear()
    one.admit()


@pytest.mark.parametrize("probing", [False, True])
async def test_a_closed_lane_serves_nobody(probing):
    one = standing()
    one.closing = True
    with pytest.raises(QueueFull, match="stopping"):
        one.admit(probing=probing)
