"""Why a prefix was lost: a pure comparison of two requests, readers of records, and reports over them."""
