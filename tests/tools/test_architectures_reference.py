"""The page of architectures: every name of the lists has a row, and the lists are read anew."""

import tomllib
from pathlib import Path

from gguf.constants import MODEL_ARCH_NAMES

from tools import architectures_reference as reference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"


def test_every_name_has_a_row() -> None:
    rows = PAGE.read_text(encoding="utf-8")
    lists = reference.lists()
    names = [name for task in reference.TASKS for name in reference.text_classes(task)]
    names += [*lists["mlx_lm"]["types"], *lists["vllm"]["classes"]]
    names += MODEL_ARCH_NAMES.values()
    assert [name for name in names if f"\n| `{name}` | " not in rows] == []


def test_no_family_has_what_is_said_to_be_missing() -> None:
    named = {*reference.architecture_families(), *reference.gguf_families()}
    assert named & reference.lists()["missing"].keys() == set()


def test_classes_left_out_are_classes_of_transformers() -> None:
    lists = reference.lists()["transformers"]
    known = {name for task in reference.TASKS for name in lists[task]}
    assert set(lists["no_text"]) <= known


def test_lists_are_read_from_packages(tmp_path: Path) -> None:
    tables = "\n".join(
        f'{table} = OrderedDict([("{task}", "{task.title()}Model"), *list(OTHER.items())])'
        for task, (table, _) in reference.TASKS.items()
    )
    files = {
        "transformers/models/auto/modeling_auto.py": tables,
        "mlx_lm/models/tiny.py": "class Model(nn.Module): ...",
        "mlx_lm/models/cache.py": "class Cache: ...",
        "vllm/model_executor/models/registry.py": (
            '_TEXT_GENERATION_MODELS = {\n    "Tiny": ("tiny", "Tiny"),\n}\nX = {\n    "Y": 1,\n}\n'
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    read = tomllib.loads("[transformers]\n" + reference.read_lists(tmp_path))
    assert {task: read["transformers"][task] for task in reference.TASKS} == {
        task: [f"{task.title()}Model"] for task in reference.TASKS
    }
    assert read["transformers"]["types"] == {"causal": "CausalModel"}
    assert (read["mlx_lm"]["types"], read["vllm"]["classes"]) == (["tiny"], ["Tiny"])
