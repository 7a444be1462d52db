"""The rule about missing parts, run in a pytest of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = (Path(__file__).parent / "conftest.py").read_text()
PROBES = "\nPARTS.update(docker=lambda: 'no engine', gpu=lambda: 'no device', ray=lambda: None)\n"


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST + PROBES)
    pytester.makeini("[pytest]\naddopts = -ra --strict-markers\nmarkers =\n  docker\n  gpu\n  ray\n")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.docker
        def test_docker(): pass

        @pytest.mark.gpu
        def test_gpu(): pass

        @pytest.mark.ray
        def test_ray(): pass

        def test_plain(): pass
    """)
    return pytester


def test_a_missing_part_skips_with_its_reason(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_REQUIRE", raising=False)
    result = suite.runpytest_inprocess()
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["not run: tests marked docker (no engine)", "*no docker: no engine*"])


def test_all_fails_for_a_missing_part_but_only_names_the_gpu(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_REQUIRE", "all")
    result = suite.runpytest_inprocess()
    result.assert_outcomes(passed=2, errors=1, skipped=1)
    result.stdout.fnmatch_lines(["*AGENTRL_REQUIRE asks for docker: no engine*", "not run: tests marked gpu*"])


def test_all_asks_only_for_parts_that_collected_tests_are_marked_with(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_REQUIRE", "all")
    suite.runpytest_inprocess("-k", "not docker").assert_outcomes(passed=2, skipped=1, deselected=1)


@pytest.mark.parametrize(("setting", "errors"), [("docker", 1), ("gpu,docker", 2), ("ray", 0)])
def test_a_list_asks_for_what_it_names(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, setting: str, errors: int
) -> None:
    monkeypatch.setenv("AGENTRL_REQUIRE", setting)
    suite.runpytest_inprocess().assert_outcomes(passed=2, errors=errors, skipped=2 - errors)


def test_an_unknown_part_is_refused(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_REQUIRE", "dokcer")
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*AGENTRL_REQUIRE=dokcer*not among all, bubblewrap, docker*"])
