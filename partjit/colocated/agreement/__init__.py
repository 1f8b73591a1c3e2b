"""Several processes that run one program: before each fragment they agree that all of them are there and well."""
