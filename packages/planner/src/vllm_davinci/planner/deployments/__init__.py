"""`vllm-davinci deployments`: how released models are deployed, as others have published it.

`table/` has a row for each deployment with its source, `models/` the configurations of the models.
A dry-run takes a row by its name.
"""
