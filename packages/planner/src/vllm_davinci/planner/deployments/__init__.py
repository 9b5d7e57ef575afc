"""`vllm-davinci deployments`: released models as others deploy them.

`table/` has a row for each deployment with its source, `models/` the configurations of the models.
A dry-run takes a row by its name.
"""
