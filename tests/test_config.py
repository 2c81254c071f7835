"""Settings: the algorithm's defaults are the original's, and every mistake is one line that names it."""

import ast
import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import yaml

from memrl import config
from memrl.commands import train
from memrl.config import OptimOptions, TrainConfig, validate, validate_start
from memrl.utils import command_line as cli

REPO = Path(__file__).resolve().parent.parent
CONFIGS = sorted(p for p in (REPO / "configs").rglob("*.yaml") if "prompts" not in p.relative_to(REPO).parts)


@pytest.fixture(scope="module")
def parse():
    """The parser of `memrl train`."""
    return train.parse


def changed(**fields) -> TrainConfig:
    """The defaults with some fields changed, which are given as `rl__clip_low=0.1`."""
    result = TrainConfig()
    for name, value in fields.items():
        *path, last = name.split("__")
        target = result
        for part in path:
            target = getattr(target, part)
        assert hasattr(target, last)
        setattr(target, last, value)
    return result


# Defaults

ORIGINAL = {
    "agent.chunk_tokens": 5000,
    "agent.memory_tokens": 1024,
    "agent.answer_tokens": 1024,
    "agent.question_tokens": 1024,
    "agent.prompts": "question_first",
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,
    "rollout.max_step_tokens": 0,
    "rl.prompts_per_step": 128,
    "rl.group_size": 16,
    "rl.updates_per_step": 16,
    "rl.normalize_std": False,
    "rl.credit": "broadcast",
    "rl.clip_low": 0.2,
    "rl.clip_high": 0.2,
    "rl.dual_clip": 3.0,
    "rl.kl_coef": 0.001,
    "rl.drop_flat_groups": False,
    "rl.micro_batch_tokens": 16384,
    "optim.lr": 1e-6,
    "optim.min_lr_ratio": 1.0,
    "optim.beta1": 0.9,
    "optim.beta2": 0.999,
    "optim.weight_decay": 0.01,
    "optim.grad_clip": 1.0,
    "checkpoint.every": 10,
    "engine.zero_stage": 3,
}


@pytest.mark.parametrize("name", ORIGINAL)
def test_the_default_is_the_originals(name):
    value = TrainConfig().to_dict()
    for part in name.split("."):
        value = value[part]
    assert value == ORIGINAL[name]
    assert type(value) is type(ORIGINAL[name])


def test_the_defaults_are_valid():
    validate(TrainConfig())


def test_warm_up_counts_optimizer_steps_and_does_not_begin_at_zero():
    from memrl.engine.deepspeed_engine import learning_rate_factor

    optim, total = OptimOptions(), 6400
    factors = [learning_rate_factor(update, update, total, optim) for update in range(total)]
    assert factors[0] == 1 / 20
    assert factors[:20] == pytest.approx([(i + 1) / 20 for i in range(20)])
    assert factors[20:] == [1.0] * (total - 20)


def test_the_rate_may_fall_linearly_to_a_part_of_the_peak():
    from memrl.engine.deepspeed_engine import learning_rate_factor

    optim = OptimOptions(warmup_updates=10, min_lr_ratio=0.1)
    assert learning_rate_factor(9, 9, 110, optim) == 1
    assert learning_rate_factor(10, 10, 110, optim) == 1
    assert learning_rate_factor(60, 60, 110, optim) == pytest.approx(0.55)
    assert learning_rate_factor(110, 110, 110, optim) == pytest.approx(0.1)
    assert learning_rate_factor(500, 500, 110, optim) == pytest.approx(0.1)
    assert learning_rate_factor(0, 0, 110, OptimOptions(warmup_updates=0)) == 1


def test_the_warm_up_counts_steps_that_were_done_and_the_fall_ends_with_the_run():
    from memrl.engine.deepspeed_engine import learning_rate_factor

    optim = OptimOptions(warmup_updates=4, min_lr_ratio=0.0)
    # Every second planned step is left out: the warm-up takes its four steps, and the last rate is the plan's last.
    factors = [learning_rate_factor(done, 2 * done, 24, optim) for done in range(12)]
    assert factors[:4] == pytest.approx([1 / 4, 2 / 4, 3 / 4, 18 / 20])
    assert factors[4:] == pytest.approx([1 - (2 * done - 4) / 20 for done in range(4, 12)])
    assert factors[-1] == pytest.approx(0.1)


def test_every_field_has_a_docstring():
    # They are what --help shows.
    for node in ast.parse(inspect.getsource(config)).body:
        if isinstance(node, ast.ClassDef):
            assert ast.get_docstring(node), node.name
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and "field(default_factory=" not in ast.unparse(field):
                    assert isinstance(after, ast.Expr), f"{node.name}.{ast.unparse(field.target)} has no docstring"


def test_the_page_of_settings_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_settings", REPO / "docs" / "make_settings.py")
    make_settings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_settings)
    assert make_settings.PAGE.read_text(encoding="utf-8") == make_settings.page(), "run python docs/make_settings.py"


# Files and command line


def test_there_is_a_configuration_for_the_miniature():
    assert REPO / "configs" / "tiny.yaml" in CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_file_loads_and_is_valid(parse, path):
    result = parse(["--config", str(path)])
    # Where the weights and the data lie is the user's business.
    result.model.path = result.data.path = None
    validate(result)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    for section, fields in content.items():  # what the file says has arrived
        if isinstance(fields, dict) and section not in ("model", "data"):
            for name, value in fields.items():
                assert getattr(getattr(result, section), name) == value


def test_options_override_files_and_later_files_override_earlier_ones(parse, tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("seed: 5\nrl: {clip_high: 0.28, group_size: 4}\n", encoding="utf-8")
    second.write_text("rl: {group_size: 8}\n", encoding="utf-8")
    result = parse(["--config", str(first), "--config", str(second), "--rl.kl_coef", "0", "--rl.dual_clip", "null"])
    assert isinstance(result, TrainConfig)
    assert (result.seed, result.rl.clip_high, result.rl.group_size) == (5, 0.28, 8)
    assert (result.rl.kl_coef, result.rl.dual_clip) == (0.0, None)
    assert result.rl.clip_low == 0.2  # the rest is the default


def test_a_resolved_configuration_reads_back_the_same(parse, tmp_path):
    first = parse(["--rl.clip_high", "0.28", "--rl.dual_clip", "null", "--report.lengths", "[6, 32]"])
    saved = tmp_path / "config.yaml"
    saved.write_text(yaml.safe_dump(first.to_dict()), encoding="utf-8")
    again = parse(["--config", str(saved)])
    assert again == first
    assert dataclasses.asdict(again) == first.to_dict()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rl.clip_hihg", "0.3"], "clip_hihg"),
        (["--nothing", "1"], "nothing"),
        (["--rl.steps", "three"], "rl.steps"),
        (["--rl.steps", "1.5"], "rl.steps"),
        (["--rl.normalize_std", "maybe"], "rl.normalize_std"),
        (["--rl.credit", "everyone"], "rl.credit"),
        (["--engine.zero_stage", "4"], "engine.zero_stage"),
        (["--resume", "perhaps"], "resume"),
        (["--config", "no/such/file.yaml"], "no/such/file.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_on_the_command_line_is_one_line_that_names_it(parse, capsys, arguments, named):
    with pytest.raises(SystemExit) as exit_info:
        parse(arguments)
    message = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert named in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rl: {clip_hihg: 0.3}", "clip_hihg"),
        ("rlx: {clip_high: 0.3}", "rlx"),
        ("rl: {steps: many}", "steps"),
        ("rl:\n# steps: 3", "rl is null; give it a value or remove its line"),
        ("seed: [1]", "seed"),
        ("report: {lengths: [six]}", "lengths"),
        ("rl: [", "mine.yaml is not a YAML file"),
    ],
)
def test_a_mistake_in_a_file_is_one_line_that_names_it(parse, capsys, tmp_path, text, named):
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as exit_info:
        parse(["--config", str(path)])
    message = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message.count("\n") == 1
    assert named in message


def test_user_errors_become_one_line_and_exit_code_2(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("MEMRL_TRACEBACK", raising=False)

    def expect(message):
        assert capsys.readouterr().err == f"error: {message}\n"

    with pytest.raises(SystemExit, match="2"), cli.user_errors():
        raise ValueError("the value is 3;\n it must be 4")
    expect("the value is 3; it must be 4")
    with pytest.raises(SystemExit, match="2"), cli.user_errors():
        open(tmp_path / "missing")
    expect(f"{tmp_path / 'missing'}: No such file or directory")
    with pytest.raises(SystemExit, match="2"), cli.user_errors():
        raise ValueError
    expect("ValueError")
    with pytest.raises(TypeError), cli.user_errors():
        raise TypeError("a bug, not a user's mistake")
    monkeypatch.setenv("MEMRL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="shown"), cli.user_errors():
        raise ValueError("shown")


# Checks across fields

AT_LEAST_ONE = [
    "rl.steps",
    "rl.prompts_per_step",
    "rl.updates_per_step",
    "rl.micro_batch_tokens",
    "agent.chunk_tokens",
    "agent.memory_tokens",
    "agent.answer_tokens",
    "agent.question_tokens",
    "rollout.max_rows",
    "data.min_chunks",
    "checkpoint.keep_last",
]


@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_counts_below_one_are_errors_that_name_the_field(name):
    with pytest.raises(ValueError, match=rf"{name} is 0; it must be (at least 1|between 1 and)"):
        validate(changed(**{name.replace(".", "__"): 0}))


WRONG = [
    ({"rl__group_size": 1}, r"rl\.group_size is 1.*at least 2"),
    ({"rl__updates_per_step": 129}, r"rl\.updates_per_step \(129\) is above rl\.prompts_per_step \(128\)"),
    ({"data__min_chunks": 9}, r"data\.max_chunks must be at least data\.min_chunks"),
    ({"rollout__temperature": 0.0}, r"rollout\.temperature is .* must be positive"),
    ({"rollout__temperature": -1.0}, r"rollout\.temperature is .* must be positive"),
    ({"rollout__top_p": 0.95}, r"rollout\.top_p must be 1"),
    ({"rollout__top_k": 50}, r"rollout\.top_k 0"),
    ({"rl__clip_low": 0.0}, r"rl\.clip_low"),
    ({"rl__clip_low": 1.0}, r"rl\.clip_low"),
    ({"rl__clip_high": 0.0}, r"rl\.clip_high"),
    ({"rl__dual_clip": 1.0}, r"rl\.dual_clip is 1\.0.*above 1, or null"),
    ({"rl__kl_coef": -0.1}, r"rl\.kl_coef is -0\.1"),
    ({"optim__lr": 0.0}, r"optim\.lr is 0\.0"),
    ({"seed": -1}, r"seed is -1; it must be between"),
    ({"threads": -1}, r"threads is -1"),
    ({"rollout__max_step_tokens": -1}, r"rollout\.max_step_tokens is -1; it must be at least 0"),
    ({"optim__beta1": 1.5}, r"optim\.beta1 is 1\.5; it must be between 0 and 0.9999999"),
    ({"optim__grad_clip": 0.0}, r"optim\.grad_clip is 0\.0; it must be positive"),
    ({"checkpoint__every": -1}, r"checkpoint\.every is -1; it must be at least 0"),
    ({"warm_start__batch_size": 0}, r"warm_start\.batch_size is 0"),
    ({"report__samples": 0}, r"report\.samples is 0"),
    ({"report__lengths": [4, 0]}, r"report\.lengths is \[4, 0\]"),
    ({"report__lengths": [4, 4]}, r"report\.lengths is \[4, 4\]"),
]

WRONG_STARTS = [
    ({"model__path": "."}, r"data\.path is missing"),
    ({"model__path": "no/such/folder", "data__path": __file__}, r"model\.path no/such/folder is not a folder"),
    ({"model__path": ".", "data__path": "no/such/file"}, r"data\.path no/such/file is not a file"),
    ({"model__path": ".", "data__path": __file__, "agent__prompts": "miniature"}, r"give --config"),
    ({"model__path": ".", "data__path": __file__, "report__lengths": [1]}, r"give --config"),
    ({"data__path": __file__, "agent__prompts": "miniature"}, r"data\.path is set, but model\.path is not"),
    ({}, r"give --config configs/tiny\.yaml"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_STARTS, ids=str)
def test_a_start_that_is_not_there_or_not_meant_is_a_one_line_error(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        validate_start(changed(**fields))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_settings_that_do_not_fit_are_one_line_errors_that_name_the_field(fields, message):
    with pytest.raises(ValueError, match=message) as error:
        validate(changed(**fields))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["seed", "rl__steps", "data__shuffle", "report__lengths"])
def test_a_null_where_a_value_belongs_is_an_error_that_names_the_field(parse, tmp_path, name, capsys):
    path = tmp_path / "mine.yaml"
    content = None
    for part in reversed(name.split("__")):
        content = {part: content}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with pytest.raises(SystemExit):
        parse(["--config", str(path)])
    assert capsys.readouterr().err.startswith(f"error: {name.replace('__', '.')} is null; ")


RIGHT = [
    {"rl__group_size": 2},
    {"rl__updates_per_step": 128},
    {"data__min_chunks": 8},
    {"rollout__temperature": 0.7},
    {"rl__clip_high": 5.0},
    {"rl__dual_clip": None},
    {"rl__dual_clip": 1.01},
    {"rl__kl_coef": 0.0},
    {"checkpoint__every": 0},
]


@pytest.mark.parametrize("fields", RIGHT, ids=str)
def test_settings_at_the_edge_of_what_is_allowed_pass(fields):
    validate(changed(**fields))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rl": {"overlong_buffers": {"memory": 2000}}}, "rl.overlong_buffers.memory is 2000; it must be at most the cap of"),
        ({"rl": {"kl_coef": float("inf")}}, "rl.kl_coef is inf"),
        ({"engine": {"zero_stage": 2, "offload_params": True}}, "engine.offload_params needs engine.zero_stage 3"),
    ],
)
def test_settings_that_would_fail_later_are_refused_at_once(options, words):
    config = TrainConfig()
    for section, values in options.items():
        for name, value in values.items():
            setattr(getattr(config, section), name, value)
    with pytest.raises(ValueError, match=re.escape(words)):
        validate(config)


def test_a_users_own_model_is_validated_on_the_users_own_documents(tmp_path):
    config = TrainConfig()
    config.model.path, config.data.path = str(tmp_path), str(tmp_path / "data.jsonl")
    (tmp_path / "data.jsonl").touch()
    validate_start(config)
    config.validation.every = 5
    with pytest.raises(ValueError, match=r"validation\.path is missing"):
        validate_start(config)
    config.validation.path = str(tmp_path / "nothing.jsonl")
    with pytest.raises(ValueError, match=r"nothing\.jsonl is not a file"):
        validate_start(config)
    config.validation.path = config.data.path
    validate_start(config)


def test_bounds_refuse_what_lies_outside_and_say_what_is_allowed():
    from memrl.utils.bounds import bounded, check_options

    @dataclasses.dataclass
    class Options:
        inclusive: float = bounded(1, 0, 1)
        exclusive: float = bounded(0.5, above=0, below=1, why="it is a share")
        optional: float | None = bounded(None, above=1)
        half: float = bounded(1.0, above=0, at_most=1)
        count: int = 0
        counts: list[int] = dataclasses.field(default_factory=list)

    for right in (Options(), Options(inclusive=0), Options(optional=1.5)):
        check_options(right)
    for wrong, message in (
        (Options(inclusive=1.5), "inclusive is 1.5; it must be between 0 and 1"),
        (Options(inclusive=float("nan")), "inclusive is nan; it must be between 0 and 1"),
        (Options(exclusive=0), "exclusive is 0; it must be above 0 and below 1; it is a share"),
        (Options(exclusive=1), "exclusive is 1; it must be above 0 and below 1; it is a share"),
        (Options(optional=1), "optional is 1; it must be above 1, or null"),
        (Options(optional=float("inf")), "optional is inf; it must be above 1 and at most 1e+30, or null"),
        (Options(half=1.5), "half is 1.5; it must be above 0 and at most 1"),
        (Options(half=0), "half is 0; it must be above 0 and at most 1"),
        (Options(count=2**31), "count is 2147483648; it must be at most 2147483647"),
        (Options(count=10**400), "count is 10000000000000000000... (401 digits); it must be at most 2147483647"),
        (Options(counts=[1, 2**31]), "counts is 2147483648; it must be at most 2147483647"),
        (Options(counts=[1] * 1001), "counts holds 1001 values; give at most 1000"),
    ):
        with pytest.raises(ValueError) as error:
            check_options(wrong)
        assert str(error.value) == message
