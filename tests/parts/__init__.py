"""Parts that several tests and benchmarks share: fake engines, faults on purpose, the audit from outside."""
