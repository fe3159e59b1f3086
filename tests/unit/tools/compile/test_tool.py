"""Log of the compiler's tool, and the command that calls the tool."""

from __future__ import annotations

from pathlib import Path

from nxtrain.tools.compile.tool import names_in, stages_in, tool_argv


def test_graphs_are_found_wherever_they_stand_in_a_log() -> None:
    log = (
        "2026-01-01 00:00:00.1:  7  INFO ||NEURON_CC_WRAPPER||: Using a cached neff at /a b/c/neuronxcc-2.1+0/"
        "MODULE_1+2/model.neff\n"
        "[rank 0] extracting: step 1\n"
        " 10%|#   | 1/10 [00:08<01:17, 8.64s/it]2026 INFO ||NEURON_CC_WRAPPER||: Extracting graphs (/a b/neuronxcc-2.1+"
        "0/MODULE_3+2/model.hlo_module.pb) for ahead-of-time parallel compilation. No compilation was done.\n"
        "Extracting graphs (/a b/c/neuronxcc-2.1+0/MODULE_4+2/model.hlo.pb) for\n"
        "Extracting graphs (/a b/c/neuronxcc-2.1+0/MODULE_3+2/model.hlo.pb) for\n"
        "New graph list from script: /a b/c/neuronxcc-2.1+0/MODULE_9+2/model.hlo_module.pb\n"
    )
    assert {key.module: name for key, name in names_in(log).items()} == {
        "MODULE_1+2": "start #1",
        "MODULE_3+2": "step 1 #1",
        "MODULE_4+2": "step 1 #2",
    }


def test_a_machine_of_some_stages_names_them_among_other_lines() -> None:
    log = (
        "backend neuron; 4 ranks: pp 4, tp 1, dp 1\n[1] pipeline stages of this machine: 1, 2 of 4\nextracting: start\n"
    )
    assert stages_in(log) == (1, 2)
    assert stages_in("backend neuron; 4 ranks: pp 4, tp 1, dp 1\nextracting: start\n") == ()


def test_the_tool_gets_a_folder_of_its_own_and_the_command_this_one(tmp_path: Path) -> None:
    assert tool_argv("/bin/tool", 8, tmp_path, ["python", "-m", "nxtrain"]) == (
        *("/bin/tool", "--num_parallel", "8", "--parallel_compile_workdir", f"{tmp_path}/work"),
        *("env", f"--chdir={Path.cwd()}", "python", "-m", "nxtrain"),
    )
