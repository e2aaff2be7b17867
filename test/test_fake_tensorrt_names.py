"""Every name that the fakes offer, against the tables of the names of the real libraries (``api_names/``)."""

import inspect
from pathlib import Path
from types import ModuleType

import pytest
from fake_engines import build_engine, doubled, passing

TABLES = Path(__file__).parent / "api_names"
COMPLETE = (
    "BuilderFlag",
    "NetworkDefinitionCreationFlag",
    "DataType",
    "TensorLocation",
    "TensorIOMode",
    "MemoryPoolType",
)
VERSIONS = {"10.3": "10.3.0", "10.13": "10.13.3.9", "11.4": "11.4.0.106"}


def table(name: str, release: str) -> dict[str, list[str]]:
    """Name -> kind and what belongs to it, of one release."""
    lines = (line.split("\t") for line in (TABLES / f"{name}.tsv").read_text().splitlines() if line[0] != "#")
    return {line[0]: line[1:-1] for line in lines if release in line[-1].split()}


def public(thing) -> list[str]:
    return [name for name in dir(thing) if not name.startswith("_")]


def parameters(function) -> str:
    """As the tables write them."""
    found = list(inspect.signature(function).parameters.values())
    return ",".join(p.name + "=" * (p.default is not p.empty) for p in found if p.name != "self")


def objects(fake) -> dict[str, object]:
    """One of each class that is made by the library itself, and one of each that a program makes."""
    trt = fake.trt
    made = build_engine(fake, doubled(), {"a": ((1, 4), (2, 4), (8, 4))})
    context = made.engine.create_execution_context()
    made.parser.parse(b"no model")
    layer = made.network.get_layer(0)
    found = [made.builder, made.config, made.network, made.profile, made.parser, made.plan, made.runtime, made.engine]
    found += [context, layer, layer.get_output(0), made.parser.get_error(0), made.config.create_timing_cache(b"")]
    found += [trt.Logger(), trt.Dims((1, 2)), trt.IOutputAllocator(), trt.IProgressMonitor(), trt.ILogger()]
    return {type(each).__name__: each for each in found}


@pytest.mark.parametrize("release", VERSIONS)
def test_tensorrt_offers_no_name_that_the_release_has_not(fake_tensorrt, release):
    fake_tensorrt.use(tensorrt=VERSIONS[release])
    trt, real = fake_tensorrt.trt, table("tensorrt", release)
    assert trt.__version__.startswith(release + ".")
    classes = [n for n in public(trt) if inspect.isclass(getattr(trt, n))]
    assert len(classes) > 30 and not [n for n in public(trt) if n not in real]
    made = objects(fake_tensorrt)
    wrong, seen = [], 0
    for name in classes:
        for attribute in {*public(getattr(trt, name)), *public(made.get(name, ()))} - set(dir(tuple)):
            full, offered = f"{name}.{attribute}", getattr(getattr(trt, name), attribute, None)
            seen += 1
            if full not in real:
                wrong.append(f"{full} is not in {release}")
            elif real[full][0] == "value":
                wrong += [] if int(offered) == int(real[full][1]) else [f"{full}: {int(offered)}, not {real[full][1]}"]
            elif real[full][0] == "method" and inspect.isfunction(offered):
                wrong += [] if parameters(offered) in real[full][1].split("|") else [f"{full}({parameters(offered)})"]
            elif real[full][0] == "property" and callable(offered):
                wrong.append(f"{full} is a method, not a property")
    assert not wrong and seen > 250


@pytest.mark.parametrize("release", VERSIONS)
def test_enums_that_programs_choose_from_are_complete(fake_tensorrt, release):
    fake_tensorrt.use(tensorrt=VERSIONS[release])
    real = table("tensorrt", release)
    for name in COMPLETE:
        members = {
            full.partition(".")[2]: int(v[1]) for full, v in real.items() if v[0] == "value" and full.startswith(name)
        }
        assert members and {k: int(v) for k, v in getattr(fake_tensorrt.trt, name).__members__.items()} == members


def test_what_11_took_away_is_not_there(fake_tensorrt):
    taken = {name for name in table("tensorrt", "10.13") if name not in table("tensorrt", "11.4")}
    assert {"BuilderFlag.FP16", "BuilderFlag.OBEY_PRECISION_CONSTRAINTS", "ILayer.precision"} < taken
    fake_tensorrt.use(tensorrt=VERSIONS["10.13"])
    made = objects(fake_tensorrt)
    before = {name for name in taken if has(fake_tensorrt.trt, made, name)}
    assert {"BuilderFlag.BF16", "ILayer.set_output_type", "NetworkDefinitionCreationFlag.EXPLICIT_BATCH"} < before
    fake_tensorrt.use(tensorrt=VERSIONS["11.4"])
    made = objects(fake_tensorrt)
    assert not {name for name in before if has(fake_tensorrt.trt, made, name)}


def has(trt: ModuleType, made: dict[str, object], name: str) -> bool:
    owner, _, attribute = name.partition(".")
    return hasattr(made.get(owner, getattr(trt, owner, None)), attribute)


@pytest.mark.parametrize("release", ["12.2", "12.9", "13.5"])
def test_cuda_offers_the_functions_of_the_release_with_as_many_values(fake_tensorrt, release):
    fake_tensorrt.use(cuda_python=release)
    cuda, real = fake_tensorrt.cudart if release == "12.2" else fake_tensorrt.cuda, table("cuda", release)
    offered = [name for name in public(cuda) if name != "live"]
    assert len(offered) > 45 and not [name for name in offered if name not in real]
    for name in offered:
        kind, told, count = real[name]
        thing = getattr(cuda, name)
        if kind == "function":
            assert parameters(thing) == told, name
        elif kind == "enum":
            wrong = {m.name: int(m) for m in thing if real[f"{name}.{m.name}"][1] != str(int(m))}
            assert not wrong
        elif kind == "constant":
            assert str(thing) == told
        else:
            assert not [a for a in public(thing(*[])) if f"{name}.{a}" not in real and kind == "class"], name


def test_without_a_gpu_every_function_gives_as_many_values_as_the_real_one(fake_tensorrt):
    fake_tensorrt.use(gpu="no driver")
    cuda = fake_tensorrt.cuda
    for name, (kind, told, count) in table("cuda", "12.9").items():
        if kind != "function" or name.startswith(("cudaGetError", "cudaGetLast")) or name.endswith("GetVersion"):
            continue
        got = getattr(cuda, name)(*[0] * len(told.split(",") if told else ()))
        assert isinstance(got, tuple) and len(got) == 1 + int(count), name
        assert got[0] == 35, name
        assert all(value is None for value in got[1:]), name
    assert passing(cuda.cudaDriverGetVersion()) == 0
    assert passing(cuda.cudaGetErrorString(cuda.cudaError_t(35))).startswith(b"CUDA driver version is insufficient")
    fake_tensorrt.use(cuda_python="12.6")  # cuda-python 12.6.0, run without a driver
    with pytest.raises(RuntimeError, match="Failed to dlopen libcuda.so.1"):
        fake_tensorrt.cudart.cudaGetDeviceCount()
    assert passing(fake_tensorrt.cudart.cudaRuntimeGetVersion()) == 12060
    with pytest.raises(ModuleNotFoundError, match="cuda.bindings"):
        _ = fake_tensorrt.cuda
