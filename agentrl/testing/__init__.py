"""What tests of packages need, ours and yours: fakes, conformance suites, a red team, chaos. Public."""
