"""One `Ops` interface (`ops`), two implementations: `reference` (torch fp32, the truth) and `cpu` (native)."""
