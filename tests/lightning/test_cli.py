# SPDX-License-Identifier: Apache-2.0
"""The command runs a YAML file, explains its options, and reports a wrong configuration in one line."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from producing import fill
from recorders import Recorder

import transfer_queue as tq
from lightning_tq import TQCLI, Producer, QueueConfig, Stream, TQDataModule
from tests.console import lightning_tq
from tests.lightning.conftest import HERE, ROOT
from transfer_queue.errors import InvalidRequestError

RUN: dict[str, Any] = {
    "trainer": {
        "max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
        "callbacks": [{"class_path": "PartitionSwitch"}, {"class_path": "QueueMonitor"}],
    },
    "model": {"class_path": "recorders.Recorder"},
    "data": {
        "train": {
            "partition": "train@{epoch}", "task": "learn", "fields": ["x", "text"], "batch_size": 4,
            "sampler": {"class_path": "transfer_queue.GRPOGroupNSampler", "init_args": {"n_samples_per_prompt": 2}},
        },
        "val": [{"partition": "val@{epoch}", "task": "evaluate", "fields": ["x", "text"], "batch_size": 4}],
        "test": {"partition": "val@0", "task": "examine", "fields": ["x", "text"], "batch_size": 4},
        "predict": {"partition": "val@0", "task": "foresee", "fields": ["x", "text"], "batch_size": 2},
        "queue": {"units": 1, "memory": "64MiB"},
        "producers": [
            {
                "target": "producing:produce_epochs", "args": {"epochs": 1, "train": 12, "val": 4},
                "stages": ["fit", "validate", "test", "predict"],
            }
        ],
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-tq"])


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``config({"data.train.batch_size": 3})``: path of RUN as a file, with these changes."""
    monkeypatch.chdir(tmp_path)

    def write(changes: dict[str, Any] | None = None) -> str:
        conf = OmegaConf.create(RUN)
        for key, value in (changes or {}).items():
            OmegaConf.update(conf, key, value, force_add=True)
        path = tmp_path / "run.yaml"
        OmegaConf.save(conf, path)
        return str(path)

    return write


def without_producers() -> dict[str, Any]:
    """Changes for a queue that has the data already."""
    address = tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}).address
    fill(tq.get_client(), "train@0", 12)
    fill(tq.get_client(), "val@0", 4)
    return {"data.producers": [], "data.queue": str(address)}


def given(tmp_path: Path) -> list[str]:
    return [line.split('"')[1] for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]


@pytest.mark.programs
def test_a_file_may_be_run_twice_in_one_place(config: Callable[..., str], tmp_path: Path) -> None:
    path = config({"model.init_args.log_dir": str(tmp_path), "data.val": None})
    assert lightning_tq(["fit", "--config", path]) == 0
    assert lightning_tq(["fit", "--config", path, "--trainer.limit_train_batches", "2"]) == 0
    assert given(tmp_path) == ["train"] * 3 + ["train"] * 2


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_resume_with_another_batch_size_is_refused_without_a_traceback(
    config: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"data.val": None, "trainer.max_steps": 1, "trainer.enable_checkpointing": True, "trainer.callbacks": []}
    path = config({**without_producers(), **changes, "trainer.default_root_dir": str(tmp_path)})
    assert lightning_tq(["fit", "--config", path]) == 0
    (saved,) = tmp_path.rglob("*.ckpt")
    other = ("--data.train.batch_size=2", "--trainer.max_steps=2")
    assert lightning_tq(["fit", "--config", path, *other, f"--ckpt_path={saved}"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: the checkpoint is at batch 1 of partition 'train@0' in stream 'train', which was")


def test_a_run_that_sigterm_ends_is_no_success(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    ends = {"model.init_args": {"fail_at": 1, "how": "SIGTERM"}, "data.val": None}
    assert lightning_tq(["fit", "--config", config({**without_producers(), **ends})]) == 143
    assert capsys.readouterr().err.splitlines()[-1] == "error: SIGTERM has ended this run before its end."


@pytest.mark.programs
def test_modules_beside_a_configuration_are_found_also_by_its_producers(
    config: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    beside.mkdir()
    elsewhere.mkdir()
    (beside / "mymodel.py").write_text(
        "from recorders import Recorder\n"
        "from producing import produce_epochs\n"
        "class Mine(Recorder): pass\n"
        "def mine(): produce_epochs(1, 12, 4)\n"
    )
    path = config(
        {
            "model.class_path": "mymodel.Mine", "model.init_args.log_dir": str(tmp_path), "data.val": None,
            "data.producers": [{"target": "mymodel:mine"}],
        }
    )  # fmt: skip
    Path(path).rename(beside / "run.yaml")
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert lightning_tq(["fit", "--config", "../beside/run.yaml"]) == 0
    assert given(tmp_path) == ["train"] * 3


@pytest.mark.programs
def test_validate_test_and_predict_read_their_streams(config: Callable[..., str], tmp_path: Path) -> None:
    logged = {"model.init_args.log_dir": str(tmp_path)}
    assert lightning_tq(["validate", "--config", config(logged)]) == 0
    path = config({**logged, **without_producers()})
    assert [lightning_tq([command, "--config", path]) for command in ("test", "predict")] == [0, 0]
    assert given(tmp_path) == ["val", "test", "predict", "predict"]


def printed_config(path: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_:
        lightning_tq(["fit", "--config", path, "--print_config"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_print_config_shows_an_equivalent_configuration(
    config: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printed_config(config(), capsys)
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert printed_config(str(again), capsys) == shown
    conf = OmegaConf.create(shown)
    assert (conf.data.queue.units, conf.data.queue.put_timeout_s) == (1, 60.0)
    assert conf.data.train.sampler == {
        "class_path": "transfer_queue.GRPOGroupNSampler", "init_args": {"n_samples_per_prompt": 2},
    }  # fmt: skip


def test_a_users_program_fixes_the_model_and_takes_its_arguments_as_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    conf = {**copy.deepcopy(RUN), "model": {"fail_at": 7}}  # the parser changes it in place
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    cli = TQCLI(Recorder, args=conf, run=False)
    assert (cli.model.fail_at, type(cli.datamodule)) == (7, TQDataModule)


def test_values_may_refer_to_others_of_the_file(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    path = config({"data.train.micro_batch_size": "${data.train.batch_size}"})
    assert re.search(r"train:(?s:.*)micro_batch_size: 4", printed_config(path, capsys))


@pytest.mark.programs
def test_a_data_section_may_name_a_subclass(
    config: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mydata.py").write_text(
        "from lightning_tq import TQDataModule\n"
        "class Mine(TQDataModule):\n"
        "    def setup(self, stage):\n"
        "        super().setup(stage)\n"
        "        print('mine')\n"
    )
    path = config(without_producers())
    conf = OmegaConf.load(path)
    conf.data = {"class_path": "mydata.Mine", "init_args": {**conf.data, "val": None}}
    OmegaConf.save(conf, path)
    within = tmp_path / "within.yaml"
    OmegaConf.save(OmegaConf.create({"fit": conf}), within)
    for words in (["fit", "-c", path], ["fit", "-c", path, "--data.init_args.val=null"], ["-c", str(within), "fit"]):
        assert lightning_tq(words) == 0
        assert "mine" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trainer.max_epoch": 3}, "unknown key 'trainer.max_epoch'; did you mean 'max_epochs'?"),
        ({"data.valid": {"task": "x"}}, "unknown key 'data.valid'; did you mean 'val'?"),
        (
            {"data.train.batchsize": 4},
            "data.train: lightning_tq.Stream has no option 'batchsize'; did you mean 'batch_size'?",
        ),
        (
            {"data.train.sampler.init_args": {"n_samples": 2}},
            "data.train.sampler: transfer_queue.GRPOGroupNSampler has no option 'n_samples'; did you mean",
        ),
        (
            {"data.val": [{"partition": "val", "task": "evaluate", "fields": ["x"], "batchsize": 4}]},
            "data.val: lightning_tq.Stream has no option 'batchsize'; did you mean 'batch_size'?",
        ),
        ({"data.queue": 5}, "data.queue: expected dict or str"),
        (
            {"data.train.sampler.class_path": "torch.nn.Linear"},
            "data.train.sampler: Import path torch.nn.Linear does not",
        ),
        ({"data.producers": [{"target": 5}]}, "data.producers.target: Type collections.abc.Callable"),
        ({"data.queue.unit": 1}, "unknown configuration key 'queue.unit'; did you mean 'units'?"),
        ({"data.train.batch_size": "four"}, "data.train.batch_size: expected int"),
        ({"data.train.micro_batch_size": 9}, "micro_batch_size 9 is larger than batch_size 4"),
        ({"data.train.where": "env = 'math'"}, "the filter \"env = 'math'\" goes wrong at character 5"),
        (
            {"data.producers": [{"target": "producing:prodce"}]},
            "producer target 'producing:prodce': module 'producing'",
        ),
        (
            {"data.producers": [{"target": "producting:produce"}]},
            "producer target 'producting:produce': there is no module 'producting'",
        ),
        ({"data.train.tail": "keep"}, "data.train.tail: Expected one of ['drop', 'pad', 'uneven_ok']"),
        ({"model.init_args.failat": 1}, "model: recorders.Recorder has no option 'failat'; did you mean 'fail_at'?"),
        (
            {"model.class_path": "recorders.Recoder"},
            "model: module 'recorders' has no attribute 'Recoder'; did you mean 'Recorder'?",
        ),
        (
            {"trainer.callbacks": [{"class_path": "lightning_tq.PartitionSwich"}]},
            "trainer.callbacks: module 'lightning_tq' has no attribute 'PartitionSwich'; did you mean",
        ),
    ],
)
def test_a_mistake_in_a_configuration_is_reported_in_one_line(
    config: Callable[..., str], capsys: pytest.CaptureFixture[str], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        lightning_tq(["fit", "--config", config(changes)])
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2].startswith(f"error: {says}"), lines


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data: [\n  a: 1\n", "can't be read as YAML: while parsing a flow sequence"),
        ("- data\n- model\n", "must contain keys and values, but its top level is a list."),
        ("data: ${nope}\n", "can't be read as YAML: Interpolation key 'nope' not found"),
    ],
    ids=["malformed", "a list", "a reference to nothing"],
)
@pytest.mark.parametrize("option", ["--config", "--data"])
def test_a_file_that_is_no_configuration_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, text: str, says: str
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    assert lightning_tq(["fit", option, str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path} {says}")


def test_an_option_is_not_guessed_from_its_beginning(
    config: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sys.exit(lightning_tq(["fit", "--config", config(), "--trainer.max_epoch", "3"]))
    says = "error: unknown option '--trainer.max_epoch'; did you mean '--trainer.max_epochs'?"
    assert capsys.readouterr().err.startswith(says)


BY_NUMBER = "items of a list can't be set by number. Change them in the file, or give the whole list."


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--data.producers.0.args.epochs", "1"], f"data.producers: {BY_NUMBER}"),
        (["--data.train.fields.0", "y"], f"data.train.fields: {BY_NUMBER}"),
        (["--data.zzzz", "1"], "unknown key 'data.zzzz'."),
        (
            ["--trainer.callbacks", "lightning_tq.PartitionSwich"],
            "trainer.callbacks: module 'lightning_tq' has no attribute 'PartitionSwich'; did you mean "
            "'PartitionSwitch'?",
        ),
    ],
)
def test_a_wrong_option_is_reported_with_the_nearest_name_if_one_is_near(
    config: Callable[..., str], capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        lightning_tq(["fit", "--config", config(), *words])
    assert capsys.readouterr().err.splitlines()[-2] == f"error: {says}"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["fti"], "unknown command 'fti'; did you mean 'fit'?"),
        (["--hlep"], "unknown option '--hlep'; did you mean '--help'?"),
        (["fit", "--confg", "run.yaml"], "unknown option '--confg'; did you mean '--config'?"),
        (["fit", "--trainr.max_epochs=3"], "unknown option '--trainr'; did you mean '--trainer'?"),
        ([], "no command was given. Use one of demo, new, fit, validate, test, predict, serve, keys, status,"),
        (["fit", "--config", "nowhere.yaml"], "config: there is no file 'nowhere.yaml'"),
        (["fit", "-c=nowhere.yaml"], "config: there is no file 'nowhere.yaml'"),
        (
            ["fit", "--trainer.max_epoch=3"],
            "unknown option '--trainer.max_epoch'; did you mean '--trainer.max_epochs'?",
        ),
    ],
)
def test_a_command_that_cannot_run_is_refused_in_a_line(
    args: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = lightning_tq(args)
    except SystemExit as exit_:
        code = int(str(exit_.code))
    assert code == 2
    assert capsys.readouterr().err.startswith(f"error: {says}")


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"data.train.sampler": "RankAwreSampler"}, 2, "error: Could not find sampler 'RankAwreSampler'. Did you mean"),
        ({"data.train.replay_from": "/nowhere"}, 2, "error: no record at /nowhere: lightning-tq record has written"),
        ({"data.queue": "ipc:///nowhere/controller"}, 1, "error: no queue at ipc:///nowhere/controller: there is no"),
    ],
)
def test_errors_of_the_queue_are_reported_without_a_traceback(
    config: Callable[..., str], capfd: pytest.CaptureFixture[str], changes: dict[str, Any], code: int, says: str
) -> None:
    assert lightning_tq(["fit", "--config", config(changes)]) == code
    said = capfd.readouterr().err
    assert says in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"strategy": "fsdp"}, "The strategy `fsdp` requires a GPU accelerator"),
        ({"devices": "two"}, "`devices` selected with `CPUAccelerator` should be an int > 0."),
    ],
    ids=str,
)
def test_what_the_trainer_refuses_is_a_wrong_configuration(
    config: Callable[..., str], capfd: pytest.CaptureFixture[str], option: dict[str, Any], says: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        lightning_tq(["fit", "--config", config({f"trainer.{name}": value for name, value in option.items()})])
    said = capfd.readouterr().err
    assert exit_.value.code == 2
    assert f"error: trainer: {says}" in said
    assert "Traceback" not in said


def test_a_configuration_that_lacks_the_stream_of_its_command_is_refused_in_a_line(
    config: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert lightning_tq(["test", "--config", config({"data.test": None})]) == 2
    said = capfd.readouterr().err
    assert "error: trainer.test needs TQDataModule(test=Stream(...)), which is missing." in said
    assert "Traceback" not in said


@pytest.mark.programs
def test_a_request_that_the_users_own_step_makes_wrongly_keeps_its_traceback(
    config: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*_: Any) -> None:
        raise InvalidRequestError("of the model")

    monkeypatch.setattr(Recorder, "training_step", step)
    with pytest.raises(InvalidRequestError, match="of the model"):
        lightning_tq(["fit", "--config", config()])


@pytest.mark.programs
def test_a_failed_producer_is_an_exit_code_and_its_traceback(
    config: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = config(
        {"data.producers": [{"target": "producing:produce_then_fail", "args": {"partition": "p", "count": 1}}]}
    )
    assert lightning_tq(["fit", "--config", path]) == 1
    assert "RuntimeError: the reward model fell over" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--help", ["--data.train", "What training reads", "How to start the queue", "--trainer.max_epochs"]),
        ("--data.train.help", ["What happens to samples that can't fill the last round"]),
        ("--data.queue.help", ["Number of storage units, which hold the values.", '"4GiB"']),
        ("--data.producers.help", ["Number of processes."]),
    ],
)
def test_help_explains_the_options(option: str, says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        lightning_tq(["fit", option])
    assert exit_.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert [text for text in says if text not in shown] == []


@pytest.mark.parametrize("cls", [Stream, Producer, QueueConfig])
def test_help_of_python_explains_every_argument(cls: type) -> None:
    explained = set(re.findall(r"^    (\w+): ", inspect.getdoc(cls) or "", re.M))
    assert [each.name for each in dataclasses.fields(cls) if each.name not in explained] == []  # type: ignore[arg-type]


def test_the_package_and_its_names_load_without_torch() -> None:
    code = (
        "import sys, lightning_tq; assert 'TQDataModule' in dir(lightning_tq); "
        "assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=HERE)
