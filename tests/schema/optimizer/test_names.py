"""The table read from Optax's source is what Optax has."""

import inspect
import subprocess
import sys
import time
import types

import optax
import optax.contrib
import pytest

from maxstack.schema.optimizer import names

KINDS = {
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
}
PUBLIC = {
    name: getattr(package, name)
    for package in (optax.contrib, optax)
    for name in dir(package)
    if not name.startswith("_")
    and callable(getattr(package, name))
    and not isinstance(getattr(package, name), types.ModuleType)
}


@pytest.mark.parametrize("name", [*names.names("transform"), *names.names("schedule")])
def test_the_static_signature_equals_the_inspected_one(name):
    read = [
        (a.name, a.kind, a.default is None)
        for a in names.signature(name).arguments
        if a.kind != "variadic"
    ]
    seen = [
        (p.name, KINDS[p.kind], p.default is p.empty)
        for p in inspect.signature(PUBLIC[name]).parameters.values()
        if p.kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    assert read == seen


def test_every_public_function_that_returns_a_transformation_is_in_the_table():
    kinds = (optax.GradientTransformation, optax.GradientTransformationExtraArgs)
    returning = {
        name
        for name, thing in PUBLIC.items()
        if inspect.isfunction(thing) and inspect.signature(thing).return_annotation in kinds
    }
    assert len(returning) > 90
    assert returning <= set(names.names("transform"))


def test_functions_without_a_return_type_are_told_apart_by_what_they_return():
    assert {"dog", "dowg", "scale_by_factored_rms", "nadam", "nadamw", "MultiSteps"} <= set(
        names.names("transform")
    )


def test_every_public_schedule_is_in_the_table():
    returning = {
        name
        for name, thing in PUBLIC.items()
        if inspect.isfunction(thing)
        and inspect.signature(thing).return_annotation == optax.Schedule
    }
    assert {"join_schedules", "exponential_decay"} < returning == set(names.names("schedule"))


@pytest.mark.parametrize(
    "name",
    [
        "huber_loss",
        "global_norm",
        "apply_updates",
        "AddNoiseState",
        "skip_not_finite",
        "inject_hyperparams",
    ],
)
def test_what_is_no_transform_has_another_role(name):
    assert names.signature(name).role == "other"


def test_partial_functions_show_the_defaults_that_they_set():
    assert names.signature("nadam")["nesterov"].default == "True"


def test_unknown_and_private_names_have_no_signature():
    assert names.signature("adamz") is None and names.signature("_typing") is None


def test_reading_the_signatures_of_a_configuration_is_quick_and_imports_no_jax():
    code = (
        "import time, sys; from maxstack.schema.optimizer.names import signature; start "
        "= time.perf_counter();"
        "[signature(n) for n in ('adamw', 'clip_by_global_norm', 'warmup_cosine_decay_schedule')];"
        "print(time.perf_counter() - start, 'jax' in sys.modules, 'optax' in sys.modules)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    seconds, *imported = min(
        (run.stdout.split() for run in runs), key=lambda found: float(found[0])
    )
    assert float(seconds) < 0.1 and imported == ["False", "False"]


def test_a_mistyped_kind_is_explained_within_half_a_second():
    names.names.cache_clear()
    start = time.perf_counter()
    assert time.perf_counter() - start < 0.5
