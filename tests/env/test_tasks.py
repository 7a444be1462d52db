"""Task sources: the same in every process, in their shares, and a curriculum that can be rebuilt."""

import datetime
import gzip
import json
import math
from collections import Counter

import pytest
from each_case import each_case

from agentrl.env.datasets import digest, read_rows
from agentrl.env.tasks import Curriculum, Epochs, Mixture, Rows, Seeds
from agentrl.errors import ConfigError, UsageError
from agentrl.records import Task
from agentrl.task_ids import task_key

ROWS = [{"question": f"q{i}"} for i in range(5)]


def questions(source, count):
    return [source.task(i).options["question"] for i in range(count)]


def test_seeds_count_up():
    source = Seeds("e", kwargs={"size": 3}, options={"level": 1}, first_seed=10)
    assert source.task(4) == Task(index=4, env="e", seed=14, kwargs={"size": 3}, options={"level": 1})
    assert [task.seed for task in Seeds("e", size=3)] == [0, 1, 2]
    with pytest.raises(IndexError, match="task 3 of a source of 3"):
        Seeds("e", size=3).task(3)


def test_rows_are_options_in_an_order_of_each_epoch():
    source = Rows("e", ROWS, options={"level": 1, "question": "default"}, seed=3, epochs=3)
    assert source.size == 15 and len(list(source)) == 15
    epochs = [questions(source, 15)[i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(epoch) == [f"q{i}" for i in range(5)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert source.task(0).options["level"] == 1
    assert len({task.seed for task in source}) == 15, "a row has another seed in every epoch"
    plain = Rows("e", ROWS, shuffle=False)
    assert questions(plain, 7) == ["q0", "q1", "q2", "q3", "q4", "q0", "q1"] and plain.size is None


def test_a_finite_source_several_times_over_each_time_in_another_order():
    source = Epochs(Seeds("e", first_seed=100, size=30), seed=1, epochs=2)
    seeds = [task.seed for task in source]
    assert source.size == 60 and [task.index for task in source] == list(range(60))
    assert sorted(seeds[:30]) == sorted(seeds[30:]) == list(range(100, 130))
    assert len({tuple(seeds[:30]), tuple(seeds[30:]), tuple(range(100, 130))}) == 3
    again = Epochs(Seeds("e", first_seed=100, size=30), seed=1)
    assert (again.size, [again.task(index).seed for index in range(60)]) == (None, seeds)
    assert [again.task(index).seed for index in (59, 0)] == [seeds[59], seeds[0]], "in whatever order it is asked"
    with pytest.raises(IndexError):
        source.task(60)
    with pytest.raises(ConfigError, match="an endless source has none"):
        Epochs(Seeds("e"), epochs=2)


def test_a_restarted_source_goes_on_where_it_stood():
    def make():
        return Mixture([Rows("a", ROWS, seed=1), Seeds("b")], [1, 2])

    whole = [make().task(0)] + [source.task(i) for source in [make()] for i in range(1, 60)]
    restarted = make()
    assert [restarted.task(i) for i in range(40, 60)] == whole[40:]
    assert [task.index for task in whole] == list(range(60))


def test_a_mixture_keeps_its_shares_at_every_index():
    weights = [0.5, 0.3, 0.15, 0.05]
    source = Mixture([Seeds(name) for name in "abcd"], weights)
    seen = Counter()
    for index in range(2_000):
        task = source.task(index)
        assert task.seed == seen[task.env], "no task of a source is left out or repeated"
        seen[task.env] += 1
        for name, weight in zip("abcd", weights, strict=True):
            assert abs(seen[name] - weight * (index + 1)) <= 2


def test_a_mixture_of_finite_sources_ends_with_the_last():
    source = Mixture([Seeds("a", size=2), Seeds("b", size=8), Seeds("c", size=4)], [5, 1, 1])
    tasks = list(source)
    assert Counter(task.env for task in tasks) == {"a": 2, "b": 8, "c": 4} and source.size == 14
    assert Counter(task.env for task in tasks[2:10]) == {"b": 4, "c": 4}, "the others keep their relative shares"
    with pytest.raises(IndexError):
        source.task(14)


@each_case(
    ("make", "said"),
    [
        (lambda: Rows("e", []), "rows = '\\[\\]'"),
        (lambda: Rows("e", ROWS, epochs=0), "epochs = 0"),
        (lambda: Mixture([Seeds("a")], [1, 2]), "one weight for each of 1 sources"),
        (lambda: Mixture([Seeds("a")], [0]), "numbers above 0"),
        (lambda: Mixture([Seeds("a")], [float("nan")]), "numbers above 0"),
        (lambda: Curriculum(Seeds("a"), hopeless=0.9, solved=0.5), "hopeless = 0.9"),
    ],
)
def test_impossible_sources_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_the_same_task_has_the_same_key_wherever_it_stands():
    one, two = Seeds("e", first_seed=4).task(1), Seeds("e").task(5)
    assert one != two and task_key(one) == task_key(two) != task_key(Seeds("e").task(4))


# --- curriculum


RATE = {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.25}  # true success rate by seed


def run(curriculum, first, last, rate=RATE):
    played = []
    for index in range(first, last):
        task = curriculum.task(index)
        curriculum.observe(task, rate[task.seed], plays=4)
        played.append(task.seed)
    return played


def test_solved_and_hopeless_tasks_pause_and_are_tried_again():
    curriculum = Curriculum(Seeds("e", size=4), min_plays=8, pause=100)
    early, later = run(curriculum, 0, 12), run(curriculum, 12, 100)
    assert Counter(early) >= Counter({0: 2, 1: 2, 2: 2, 3: 2}), "each is tried until it is known"
    assert set(later) == {1, 3} and curriculum.pausing == (1, 1)
    again = run(curriculum, 100, 140)
    assert 1 <= again.count(0) <= 2 and 1 <= again.count(2) <= 2, "they are due again, and pause again"


def test_a_forgotten_task_comes_back():
    curriculum = Curriculum(Seeds("e", size=4), min_plays=4, pause=50, smoothing=0.5)
    run(curriculum, 0, 40)
    forgotten = {**RATE, 0: 0.5}
    run(curriculum, 40, 120, forgotten)
    assert run(curriculum, 120, 160, forgotten).count(0) >= 10


def test_where_everything_pauses_the_first_due_is_played():
    curriculum = Curriculum(Seeds("e", size=2), min_plays=1, pause=1_000)
    assert run(curriculum, 0, 8, {0: 1.0, 1: 1.0}) == [0, 1] * 4


def test_a_curriculum_is_rebuilt_from_what_was_observed():
    first = Curriculum(Seeds("e", size=4), pause=20)
    journal = []
    for index in range(60):
        task = first.task(index)
        journal.append(task)
        first.observe(task, RATE[task.seed])
    rebuilt = Curriculum(Seeds("e", size=4), pause=20)
    for task in journal:
        rebuilt.observe(task, RATE[task.seed])
    assert run(rebuilt, 60, 120) == run(first, 60, 120)


def test_endless_pools_are_cut_and_foreign_tasks_ignored():
    curriculum = Curriculum(Seeds("e"), pool=3)
    assert {task.seed for task in (curriculum.task(i) for i in range(10))} == {0, 1, 2}
    curriculum.observe(Seeds("other").task(0), 1.0)
    assert curriculum.pausing == (0, 0)


# --- data sets


def test_json_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "é", "n": 1}\n\n{"q": "2"}\n', encoding="utf-8")
    assert list(read_rows(str(path))) == [{"q": "é", "n": 1}, {"q": "2"}]


@each_case(
    ("name", "content", "said"),
    [
        ("rows.jsonl", b'{"q": 1}\n{"q": \n', "line 2 is not JSON"),
        ("rows.jsonl", b"[1]\n", "line 1 is not a JSON object"),
        ("rows.jsonl", b"\xff\xfe", "not UTF-8 text at byte 0"),
        ("rows.jsonl", b'{"q": 1}\n{"q": NaN}\n', "line 2 is not JSON: NaN is no number that JSON has"),
        ("rows.jsonl", b'{"q": [{"r": -Infinity}]}\n', "line 1 is not JSON: -Infinity is no number"),
        ("rows.jsonl", b'{"q": 1}\n\n{"q": 1e999}\n', "line 3 is not JSON: 1e999 is no number"),
        ("rows.jsonl", b'{"q": 1, "q": 2}\n', "line 1 is not JSON: the key 'q' stands twice"),
        ("rows.json", b'[{"q": 1, "q": 2}]', "line 1 is not JSON: the key 'q' stands twice"),
        ("rows.jsonl", b"[" * 100_000, "line 1 is not JSON: it is nested too deeply"),
        ("rows.json", b"[" * 100_000, "line 1 is not JSON"),
        ("rows.json", b'[\n {"q": 1},\n {"q": NaN}\n]', "rows.json, line 3 is not JSON: NaN is no number"),
        ("rows.json", b'[\n {"q": 1},\n 2\n]', "rows.json, line 3: entry 1 is not a JSON object"),
        ("rows.json", b'[\n {"q": 1}\n {"q": 2}\n]', "rows.json, line 3 is not JSON: expected ',' or ']'"),
        ("rows.json", b'[{"q": 1}', "rows.json, line 1 is not JSON: expected"),
        ("rows.json", b'[{"q": 1}]\n[]', "rows.json is not JSON: there is more behind the array"),
        ("rows.csv", b"q,a\n1,2\n3\n", "rows.csv, line 3 has 1 values for 2 columns"),
        ("rows.csv", b'q,a\n"1,2\n', "rows.csv, line 2 is not CSV: unexpected end of data"),
        ("rows.csv", b"q,q\n1,2\n", "rows.csv, line 1: .* are not the names of columns"),
        ("rows.jsonl.gz", b"\x1f\x8b no", "rows.jsonl.gz is no gzip file"),
        ("rows.xml", b"any", "rows.xml': give .jsonl, .json, .csv"),
        ("rows", b"any", "rows, line 1 is not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        read_rows(str(path))


@each_case("packed", [False, True])
@each_case("mark", [b"", b"\xef\xbb\xbf"])
@each_case(
    ("name", "content"),
    [
        ("rows.jsonl", '{"q": "é", "a": "1"}\n\n{"q": "x\u2028y,\\n", "a": "2"}\n'),
        ("rows.ndjson", '{"q": "é", "a": "1"}\n{"q": "x\u2028y,\\n", "a": "2"}'),
        ("rows.json", '{"q": "é", "a": "1"}\n{"q": "x\u2028y,\\n", "a": "2"}'),
        ("rows.json", ' [ {"q": "é",\n "a": "1"} ,\n{"q": "x\u2028y,\\n", "a": "2"}\n ]\n'),
        ("rows.csv", 'q,a\r\né,1\r\n\r\n"x\u2028y,\n",2\r\n'),
        ("rows.tsv", 'q\ta\né\t1\n"x\u2028y,\n"\t2\n'),
    ],
)
def test_every_form_of_file_gives_the_same_rows(tmp_path, name, content, mark, packed):
    data = mark + content.encode()
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(gzip.compress(data) if packed else data)
    assert list(read_rows(str(path))) == [{"q": "é", "a": "1"}, {"q": "x\u2028y,\n", "a": "2"}]


def test_an_empty_array_has_no_rows_and_a_cell_may_be_long(tmp_path):
    (tmp_path / "none.json").write_text("[ ]")
    assert list(read_rows(str(tmp_path / "none.json"))) == []
    (tmp_path / "long.csv").write_text("q\n" + "x" * 300_000 + "\n")
    assert len(read_rows(str(tmp_path / "long.csv"))[0]["q"]) == 300_000


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"abc")
    assert digest(str(path)) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of FIPS 180-2
    with pytest.raises(UsageError, match="No such file"):
        digest(str(tmp_path / "none.jsonl"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.jsonl.*No such file"):
        read_rows(str(tmp_path / "none.jsonl"))


@pytest.mark.adapters
def test_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"q": "a", "n": [1, 2], "on": datetime.date(2024, 1, 2)}, {"q": None, "n": [], "on": None}]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    read = read_rows(str(path))
    assert list(read) == [{"q": "a", "n": [1, 2], "on": "2024-01-02"}, {"q": None, "n": [], "on": None}]
    assert json.loads(json.dumps(list(read))) == list(read)
    parquet.write_table(pyarrow.Table.from_pylist([{"q": b"\xff"}]), path)
    with pytest.raises(UsageError, match=r"row 0: JSON cannot carry column 'q' = b'.xff': bytes; decode"):
        read_rows(str(path))
    parquet.write_table(pyarrow.Table.from_pylist([{"q": 1.0}, {"q": math.nan}]), path)
    with pytest.raises(UsageError, match=r"row 1: JSON cannot carry column 'q' = nan"):
        read_rows(str(path))
    path.write_bytes(b"no table")
    with pytest.raises(UsageError, match=r"cannot read '.*rows\.parquet': ArrowInvalid"):
        read_rows(str(path))


@pytest.mark.adapters
def test_a_local_hugging_face_data_set(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"q": "a"}\n{"q": "b"}\n')
    assert list(read_rows(f"hf:{tmp_path}:train")) == [{"q": "a"}, {"q": "b"}]
    assert digest(f"hf:{tmp_path}") == digest(f"hf:{tmp_path}:train")


CONFIGS = """---
configs:
- config_name: main
  data_files: [{split: train, path: main.jsonl}, {split: test, path: test.jsonl}]
- config_name: socratic
  data_files: [{split: train, path: socratic.jsonl}]
---
"""


@pytest.mark.adapters
def test_a_hugging_face_data_set_with_configurations(tmp_path):
    (tmp_path / "README.md").write_text(CONFIGS)
    for name in ("main", "test", "socratic"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"q": name}) + "\n")
    assert list(read_rows(f"hf:{tmp_path}:socratic:train")) == [{"q": "socratic"}]
    assert list(read_rows(f"hf:{tmp_path}:main:test")) == [{"q": "test"}]
    with pytest.raises(UsageError, match=r"hf:NAME:CONFIG:SPLIT.*\['main', 'socratic'\]") as named:
        read_rows(f"hf:{tmp_path}:train")
    assert "\n" not in str(named.value)
    with pytest.raises(UsageError, match=r"Unknown split"):
        read_rows(f"hf:{tmp_path}:main:dev")


@each_case("where", ["hf:", "hf:a/b:c:d:e", "hf:a/b:", "hf:a/b::train"])
def test_a_name_of_another_form_is_refused(where):
    with pytest.raises(UsageError, match="give hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT"):
        read_rows(where)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UsageError, match="pip install datasets"):
        read_rows("hf:some/name")
