"""`vllm-davinci deployments`: how are released models deployed, as published by others?

`table/` has a row for each deployment with its source, `models/` the configurations of the models.
A dry-run takes a row by its name.
"""
