"""Installed providers have their role's functions, with the arguments that core passes."""

import inspect

import pytest

from vllm_davinci.core import components

# Excludes devices, whose functions may be compiled and have no readable signature.
ROLES = {role.package: role for role in components.ROLES}


@pytest.mark.parametrize("package", sorted(ROLES))
def test_a_provider_takes_the_arguments_of_its_role(package: str):
    role = ROLES[package]
    functions = inspect.getmembers(role.protocol, inspect.isfunction)
    called = {name: function for name, function in functions if not name.startswith("_")}
    providers = components.find(role)
    assert called and providers
    for provider in providers.values():
        for name, function in called.items():
            _, *asked = inspect.signature(function).parameters.values()  # without self
            taken = inspect.signature(getattr(provider, name)).parameters
            fixed = [each.name for each in asked if each.kind != each.VAR_KEYWORD]
            assert set(fixed) <= set(taken), f"{package}: {name}"
            others = [each for each in list(taken.values()) if each.name not in fixed]
            free = len(fixed) == len(asked)
            assert not free or all(each.default != each.empty for each in others), name
