"""Runs on CUDA streams and in CUDA graphs, and comparison of their bits."""

import torch


def assert_same_bits(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.to(e.device), e)


def run_on_side_stream(function, tensors):
    """Run `function` on a stream that writes its inputs late; any other stream reads NaN."""
    late = [torch.full_like(x, torch.nan).requires_grad_() for x in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles, about 0.1 s
        with torch.no_grad():
            for x, value in zip(late, tensors, strict=True):
                x.copy_(value)
        results = function(late)
    stream.synchronize()
    return results


def run_in_graph(function, tensors):
    """Capture `function` with zeros, replay it with `tensors`, and return the results."""
    static = [torch.zeros_like(x).requires_grad_() for x in tensors]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # allocations and lazy loading happen before the capture
        for _ in range(2):
            function(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(static)
    with torch.no_grad():
        for x, value in zip(static, tensors, strict=True):
            x.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    return results
