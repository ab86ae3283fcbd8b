"""One `Ops` interface (`ops`), several implementations: `reference` (torch fp32, the truth), `cpu` (native), `cuda`."""
