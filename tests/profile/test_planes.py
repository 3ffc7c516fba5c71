"""Traces by their documented form, made by hand: GPUs, TPUs, and what seldom is in those of CPUs,
which test_figures.py takes of real runs."""

import dataclasses

import pytest
from xspace import Event, xspace

from maxstack.errors import DataError
from maxstack.profile import analysis, report, trace_files
from maxstack.profile.planes import Program, read
from maxstack.profile.trace_files import Facts

# A program of two matrix products, between which devices add up, and a loop.
TEXT = """HloModule jit_traced, is_scheduled=true, num_partitions=2

FileNames
1 "/home/me/maxstack/layers/mlp.py"

FunctionNames
1 "up"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%body (b: (s32[], f32[512,512])) -> (s32[], f32[512,512]) {
  %b = (s32[], f32[512,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[512,512]{1,0} get-tuple-element(%b), index=1
  %dot.2 = f32[512,512]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(traced)/transpose(jvp())/while/body/model.blocks.block.mlp/dot_general" stack_frame_id=1}
  ROOT %t = (s32[], f32[512,512]{1,0}) tuple(%i, %dot.2)
}

%condition (c: (s32[], f32[512,512])) -> pred[] {
  %c = (s32[], f32[512,512]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%sum (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %add = f32[] add(%p, %q)
}

ENTRY %main (a: f32[512,512], n: s32[]) -> (s32[], f32[512,512]) {
  %a = f32[512,512]{1,0} parameter(0), metadata={op_name="state.params['up']"}
  %n = s32[] parameter(1)
  %dot.1 = f32[512,512]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(traced)/jvp(model.blocks.block.mlp)/dot_general" stack_frame_id=1}
  %all-reduce-start.1 = f32[512,512]{1,0} all-reduce-start(%dot.1), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%sum, metadata={op_name="jit(traced)/jvp(model.blocks.block.mlp)/psum" stack_frame_id=1}
  %copy.1 = f32[512,512]{1,0} copy(%dot.1)
  %all-reduce-done.1 = f32[512,512]{1,0} all-reduce-done(%all-reduce-start.1)
  %tuple.1 = (s32[], f32[512,512]{1,0}) tuple(%n, %all-reduce-done.1)
  ROOT %while.1 = (s32[], f32[512,512]{1,0}) while(%tuple.1), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}
}
"""  # noqa: E501
FACTS = Facts(
    steps=[6, 7], device_kind="", devices=2, processes=1, mesh={"data": 2, "tensor": 1},
    tokens=1000, flops=4e9, memory={"needed": 3 << 20}, usable=None, peak=None, allocations=[],
)  # fmt: skip


def write(run, kind, planes):
    """A run's folder with a trace of these planes."""
    folder = run / "profile" / "6"
    session = folder / trace_files.SESSIONS / trace_files.session(0)
    session.mkdir(parents=True)
    (session / "host.xplane.pb").write_bytes(xspace(planes))
    trace_files.write(folder, TEXT, dataclasses.replace(FACTS, device_kind=kind))
    rows = [f'{{"step": {n}, "data_wait": 0.5, "step_seconds": 8e-6}}\n' for n in (6, 7)]
    (run / "metrics.jsonl").write_text("".join(rows))
    return run


def gpu(device):
    """Three steps of 100 us, 20 us apart, of which the first is there in part; 30 us of a sum over
    devices run beside 10 us of a copy."""

    def kernel(name, op, begin, length):
        stats = {"hlo_op": op, "hlo_module": "jit_traced", "program_id": 3}
        return Event(name, begin, length, stats)

    compute, communication = [], []
    for step, at in enumerate((0, 120, 240)):
        if step:
            compute.append(kernel("gemm_fusion", "dot.1", at, 40))
            communication.append(kernel("ncclDevKernel", "all-reduce-start.1", at + 40, 30))
            compute.append(kernel("copy", "copy.1", at + 45, 10))
        compute.append(kernel("gemm", "dot.2", at + 70, 15))
        compute.append(kernel("gemm", "dot.2", at + 85, 15))
    compute.append(Event("MemcpyD2H", 341, 5, {"memcpy_details": "kind_src:device"}))
    return {"Stream #1(Compute)": compute, "Stream #2(Compute)": communication}


def tpu(device):
    """The same on a TPU, whose loop has an event around those inside it."""
    ops, beside, modules = [], [], []
    for number, at in ((10, 0), (11, 120), (12, 240)):
        if number > 10:
            ops.append(Event("%dot.1 = f32[512,512]{1,0} dot(%a, %a)", at, 40))
            ops.append(Event("%all-reduce-start.1 = (...) all-reduce-start(...)", at + 40, 1))
            ops.append(Event("%copy.1 = f32[512,512] copy(%dot.1)", at + 45, 10))
            ops.append(Event("%all-reduce-done.1 = f32[512,512] all-reduce-done(...)", at + 60, 10))
            beside.append(Event("%all-reduce-start.1 = (...)", at + 40, 30))
        ops.append(Event("%while.1 = (...) while(...)", at + 70, 30))
        ops.append(Event("%dot.2 = f32[512,512] dot(...)", at + 70, 14))
        ops.append(Event("%dot.2 = f32[512,512] dot(...)", at + 85, 14))
        modules.append(Event("jit_traced(77)", at, 100, {"run_id": number}))
    return {"XLA Modules": modules, "XLA Ops": ops, "Async XLA Ops": beside, "Steps": []}


@pytest.fixture(params=["gpu", "tpu"])
def profile(request, tmp_path):
    """The profile of such a trace of two devices."""
    kind = {"gpu": "NVIDIA H100 80GB HBM3", "tpu": "TPU v5 lite"}[request.param]
    of = {"gpu": gpu, "tpu": tpu}[request.param]
    planes = {f"/device:{request.param.upper()}:{n}": of(n) for n in range(2)}
    return analysis.summary(write(tmp_path / "run", kind, planes))


def test_a_step_in_part_is_left_out_and_times_are_of_one_step_and_device(profile):
    assert profile.steps == (6, 7) and profile.dropped == 1 and profile.devices == 2
    assert profile.step_seconds == pytest.approx(120e-6)
    assert profile.idle == pytest.approx(20e-6)


def test_time_before_a_step_is_waiting_for_input_as_far_as_metrics_say(profile):
    assert profile.waiting == pytest.approx(4e-6)


def test_a_loop_is_not_counted_beside_what_it_runs(profile):
    own = {row.name: row.seconds for row in profile.operations}
    assert own["dot.2"] == pytest.approx({"gpu": 30e-6, "tpu": 28e-6}[profile.platform])
    assert own.get("while.1", 0.0) == pytest.approx({"gpu": 0, "tpu": 2e-6}[profile.platform])
    assert sum(own.values()) == pytest.approx(profile.busy)


def test_a_collective_is_exposed_where_nothing_else_runs(profile):
    (row,) = profile.collectives
    assert (row.kind, row.axes, row.times) == ("all-reduce", ("data",), 1)
    assert row.bytes == 512 * 512 * 4 and row.seconds == pytest.approx(30e-6)
    assert row.exposed == pytest.approx(20e-6)


def test_layers_directions_and_lines_come_from_the_text(profile):
    (layer,) = [row for row in profile.layers if row.name == "model.blocks.block.mlp"]
    assert layer.seconds["backward"] == pytest.approx(
        {"gpu": 30e-6, "tpu": 28e-6}[profile.platform]
    )
    assert profile.lines[0].source == "/home/me/maxstack/layers/mlp.py:7"
    assert profile.attributed > 0.95


def test_bounds_are_those_of_the_chip(profile):
    (product,) = [row for row in profile.operations if row.name == "dot.1"]
    assert product.flops == 2 * 512**3 and product.limit in ("compute", "memory")
    assert 0 < product.bound < product.seconds and 0 < profile.bound < profile.busy
    assert profile.mfu == pytest.approx(
        4e9 / 120e-6 / 2 / {"gpu": 989.4e12, "tpu": 197e12}[profile.platform], rel=0.01
    )


def test_what_no_device_was_at_hand_for_says_so(profile):
    text = report.text(profile)
    assert "unproven" in text and "of its bound" in text and "all-reduce" in text


def test_a_trace_without_operations_names_command_buffers(tmp_path):
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(xspace({"/device:GPU:0": {"Stream #1": []}}))
    with pytest.raises(DataError, match="xla_gpu_enable_command_buffer"):
        read(path)


def test_kernels_without_the_names_of_operations_are_told(tmp_path):
    bare = {"Stream #1": [Event("kernel", 0, 5), Event("kernel", 9, 5)]}
    run = write(tmp_path / "run", "NVIDIA H100 80GB HBM3", {"/device:GPU:0": bare})
    with pytest.raises(DataError, match="no operation of the step.*xla_gpu_enable_command_buffer"):
        analysis.summary(run)


def test_an_operation_of_a_cpu_ends_where_what_waited_for_it_begins(tmp_path):
    """The thread that did the last part of norm ran product before it said that norm had ended."""
    at = {"hlo_module": "jit_step"}
    main = [
        Event("ThunkExecutor::Execute", 0, 150),
        Event("norm", 100, 40, at | {"hlo_op": "norm", "_p": 1}),
        Event("late", 145, 1, at | {"hlo_op": "late", "_p": 3}),
    ]
    other = [
        Event("ThunkExecutor::Execute", 160, 9000),
        Event("product", 170, 8900, at | {"hlo_op": "product", "_p": 2}),
        Event("end: norm", 9161, 0, {"_c": 1}),
        Event("end: late", 9500, 0, {"_c": 3}),
    ]
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(xspace({"/host:CPU": {"main": main, "pool": other}}))
    ends = {event.name: event.end / 1e3 for event in read(path).events}
    assert ends == pytest.approx({"norm": 160, "late": 9500, "product": 9070})


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(b"\xff\xff no trace")
    with pytest.raises(DataError, match="not a trace of jax's profiler"):
        read(path)


def test_programs_of_a_tpu_are_told_apart_by_their_number(tmp_path):
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(xspace({"/device:TPU:3": tpu(3)}))
    events = read(path).events
    assert {event.program for event in events} == {Program("jit_traced", 77)}
    assert {event.device for event in events} == {3} and {e.run for e in events} == {10, 11, 12}
