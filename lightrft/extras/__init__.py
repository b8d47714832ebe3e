"""Hold what stands beside training and can be deleted: nothing outside this folder imports it."""
