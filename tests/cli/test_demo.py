"""`make demo` itself, on the real default models: made on first use where the user's cache lacks them."""

from __future__ import annotations

import json

import pytest

from synapse_host.cli import main

pytestmark = [pytest.mark.process, pytest.mark.llama]


def test_the_demo_does_the_main_job_and_survives_a_killed_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    models = {row["lane"]: row["model"] for row in document["lanes"]}
    assert (models["embed"], models["rerank"], models["generate"]) == ("minilm", "ms-marco", "smollm2")
    similarity = document["embed"]["similarity"]
    # A cat on a mat is nearer to a feline on a rug than to interest rates.
    assert similarity[0][1] > 0.4 > similarity[0][2]
    assert document["rerank"]["order"] == [1, 2, 0]
    assert document["generate"]["text"].strip().startswith("Rome")
    recovery = document["recovery"]
    assert recovery["same_answer"] is True and recovery["killed_pid"] != recovery["worker_pid"]
