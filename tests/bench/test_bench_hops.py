"""The exchange that is timed is the real one: real ports and the real barrier, in processes of their own."""

import io

from rich.console import Console

from edgemesh.cli import bench_hops


def test_every_way_is_measured_and_compared():
    timings = bench_hops.measure([1, 2], ticks=100, rounds=1, progress=lambda _: None)
    found = {(each.what, each.groups, each.way) for each in timings}
    ways = {("barrier", size, way) for size in (1, 2) for way in ("mesh", "sockets", "gloo")}
    assert found == ways | {("hop", 1, "mesh"), ("hop", 1, "sockets")}
    assert all(0 < each.p50_us <= each.p99_us for each in timings)
    out = io.StringIO()
    bench_hops.show(timings, Console(file=out, width=120))
    assert "barrier" in out.getvalue()
