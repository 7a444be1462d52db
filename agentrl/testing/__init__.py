"""Parts for the tests of packages, ours and yours: fakes, conformance suites, a red team. Public."""
