"""No flag of a recipe is taken for one of its launcher, and none of the launcher's is merely called unknown."""

import importlib
import re
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from memsave_recipes.core.errors import InputError
from memsave_recipes.training.arguments import RunArguments
from memsave_recipes.training.parsing import ELSEWHERE, parse_arguments

RECIPES = Path(__file__).parents[2] / "recipes"
ACCELERATE = set(launch_command_parser()._option_string_actions)
TORCHRUN = set(get_args_parser()._option_string_actions)
HARMLESS = {"--help"}  # before the script it is the launcher's


@pytest.fixture(params=sorted(path.stem for path in RECIPES.glob("*.py")))
def flags(request, monkeypatch, capsys):
    """Those that ``--help`` of a recipe lists."""
    monkeypatch.syspath_prepend(RECIPES)
    with pytest.raises(SystemExit):
        importlib.import_module(request.param).main(["--help"])
    found = set(re.findall(r"^ +(?:-\w, )?(--\w+)", capsys.readouterr().out, flags=re.MULTILINE))
    assert "--global_batch_size" in found
    return found


def test_no_launcher_swallows_a_flag(flags):
    """One that is put before the script is the recipe's alone, so the launcher refuses it."""
    assert flags & (ACCELERATE | TORCHRUN) <= HARMLESS


def test_torchrun_takes_no_flag_for_an_abbreviation(flags):
    """It reads what follows the script too, and ends with "ambiguous option" where one could be several of its own."""
    taken = {flag for flag in flags if any(option.startswith(flag) for option in TORCHRUN)}
    assert taken <= HARMLESS


def test_what_another_program_calls_by_its_own_name_is_no_flag_of_a_recipe(flags):
    assert not flags & {f"--{name}" for name in ELSEWHERE}


@pytest.mark.parametrize(
    ("words", "example"),
    [
        (["--num_processes", "2"], "--num_processes 2"),
        (["--num-processes=2"], "--num-processes=2"),
        (["--mixed_precision", "bf16"], "--mixed_precision bf16"),
        (["--config_file", "accelerate_configs/cpu.yaml", "--seed", "1"], "--config_file accelerate_configs/cpu.yaml"),
        (["--multi_gpu", "--seed", "1"], "--multi_gpu"),
        (["--max_restarts", "3"], "--max_restarts 3"),
    ],
)
def test_a_flag_of_the_launcher_is_told_where_it_belongs(words, example):
    with pytest.raises(InputError) as error:
        parse_arguments(RunArguments, args=["--output_dir", "x", *words])
    flag = words[0].partition("=")[0]
    assert str(error.value) == f"{flag} belongs before the script: accelerate launch {example} recipes/..."


def test_also_in_a_preset(tmp_path):
    preset = tmp_path / "preset.yaml"
    preset.write_text("mixed_precision: bf16\n")
    with pytest.raises(InputError, match="belongs before the script: accelerate launch --mixed_precision bf16 recipes"):
        parse_arguments(RunArguments, args=["--output_dir", "x", "--config", str(preset)])


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_flag_of_another_program_is_told_what_does_its_work(name):
    with pytest.raises(InputError, match=f"--{name} is not a flag of this recipe: .+"):
        parse_arguments(RunArguments, args=["--output_dir", "x", f"--{name}", "1"])
