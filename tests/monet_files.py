"""Files as MONeT's and Checkmate's solvers write them."""

import pickle
import sys
import types
from collections import OrderedDict, defaultdict

import numpy as np

FORWARD = ("aten::_convolution", "aten::batch_norm", "aten::relu_", "int::ReLUInt", "aten::addmm")


def monet_classes(monkeypatch):
    """Classes where MONeT has them, for as long as a test lasts."""
    found = {}
    for module, names in {
        "monet": (),
        "monet.solver_info": ("SolverInfo", "FwdNode", "BwdNode", "IntNode"),
        "monet.cvxpy_solver": ("Solution",),
        "monet.graph": ("ComputeNode", "Param"),
        "checkmate": (),
        "checkmate.checkmate_solver": ("CheckmateSolution",),
        "monet.pipelined_solver_info": ("PipelinedSolverInfo",),
    }.items():
        made = types.ModuleType(module)
        for name in names:
            found[name] = type(name, (), {"__module__": module})
            setattr(made, name, found[name])
        monkeypatch.setitem(sys.modules, module, made)
    outer = found["ComputeNode"]
    for name in ("D", "V"):
        found[name] = type(name, (), {"__module__": outer.__module__, "__qualname__": f"ComputeNode.{name}"})
        setattr(outer, name, found[name])
    return found


def made(classes, name, **attributes):
    item = classes[name]()
    vars(item).update(attributes)
    return item


def priced(ms, mib=0.0, **more):
    """The costs of a node with one option each."""
    times, spaces = ([np.float32(item) for item in np.atleast_1d(each)] for each in (ms, mib))
    spaces = spaces * len(times) if len(spaces) == 1 else spaces
    costs = {"workspace_compute": times, "workspace_mem": [np.float64(item) for item in spaces]}
    costs |= {f"recompute_{name}": item for name, item in costs.items()}
    costs |= {f"inplace_{name}": costs[name] for name in ("workspace_compute", "workspace_mem")}
    return costs | more


def solver_nodes(classes):
    """A small training step: five forward operators of 4 MiB, the loss, four backward ones; 8 MiB of parameters."""
    size, forward, loss = 4 * 2**20, list(FORWARD), len(FORWARD)
    nested = [made(classes, "D", index=0, requires_grad=True), made(classes, "V", value=[2, 2])]
    reads = [[[]], [[0]], [[1]], [[2]], [[2]]]
    costs = [
        priced([2.0, 1.0, -1000.0], [0.0, 1.0, 0.0]),
        priced(0.5, recompute_workspace_compute=[np.float32(0.25)]),
        priced(0.3, inplace_workspace_compute=[np.float32(0.2)], inplace_workspace_mem=[np.float64(-4.0)]),
        priced(0.1),
        priced(1.0),
    ]
    nodes = {}
    for index, op in enumerate(forward):
        kind = "IntNode" if op.startswith("int::") else "FwdNode"
        gnode = made(classes, "ComputeNode", op=op, shape=[-1, 4], args=nested)
        mem = np.int64(size // 32 if kind == "IntNode" else size)
        nodes[index] = made(
            classes,
            kind,
            op=op,
            gnode=gnode,
            args=reads[index],
            mem=mem,
            fixed_mem=2 * size,
            local_tensors={0, 1},
            **costs[index],
        )
    nodes[loss] = made(classes, "FwdNode", op="loss::loss", args=[[4]], mem=0, fixed_mem=2 * size, **priced(0.0))
    backward = [
        ("aten::addmm_param_grad", [[2, 5]], 0, priced(0.5), 3 * size),
        ("aten::addmm_ip_grad", [[5]], size, priced(0.5), 3 * size),
        ("aten::relu__ip_grad", [[1, 7], [2, 7], [3, 7]], size, priced([0.3, 0.3, 0.4]), 3 * size),
        ("aten::_convolution_param_grad", [[8]], 0, priced([3.0, 2.0]), 4 * size),
    ]
    for index, (op, args, mem, cost, fixed) in enumerate(backward, loss + 1):
        param = made(classes, "Param", shape=[4, 4])
        nodes[index] = made(
            classes, "BwdNode", op=op, fwd_id=0, args=args, mem=mem, fixed_mem=fixed, stored=[param], **cost
        )
    return nodes


def solution(classes, protocol=4, **changes):
    """A solution as MONeT's solver writes it, for five forward operators and four backward ones.

    Its objective is 961.05 ms, which its costs do not come to: they come to 7.04 ms, as ceilings of 0.01 ms.
    """
    nodes = solver_nodes(classes)
    loss = len(FORWARD)
    stages = len(nodes) - loss
    r = np.zeros((stages, loss + 1))
    r[0] = 1
    r[0, 3] = 0
    r[:, loss] = 1
    r[3, 1] = r[3, 2] = r[3, 3] = r[4, 1] = 1
    s = np.zeros((stages + 1, loss + 1))
    s[1, [0, 2]] = 1
    m, rf, ip = np.zeros((stages, 3)), np.zeros((stages, 2, 3)), np.zeros((stages, loss + 1))
    m[:, 0] = 1
    m[3] = [0, 0, 1]
    rf[0, 0, 1] = rf[4, 1, 1] = 1
    ip[0, 2] = 1
    info = {
        "nodes": nodes,
        "loss": loss,
        "bs": 184,
        "model_name": "resnet50",
        "mode": "conv_multiway_newnode",
        "data_path": "resnet50_184_inplace_conv_multiway_newnode",
        "deps": defaultdict(list, {1: [2]}),
        "order": OrderedDict(a=1),
        "conv_list": defaultdict(None, {0: 0, 9: 1}),
        "inplace_list": defaultdict(None, {2: 1}),
    }
    facts = {
        "r": r,
        "s": np.asfortranarray(s),
        "m": m,
        "rf": rf,
        "ip": ip,
        "solve_time": 86400.5,
        "runtime_expected": np.float64(96105.0),
    }
    info.update({name: value for name, value in changes.items() if name in info})
    facts.update({name: value for name, value in changes.items() if name in facts})
    for name in changes.get("without", ()):
        info.pop(name, None)
        facts.pop(name, None)
    pair = [made(classes, "SolverInfo", **info), made(classes, "Solution", **facts)]
    return pickle.dumps(pair, protocol=protocol)


def checkmate_solution(classes, protocol=4):
    """A solution of Checkmate's solver on the same step: a stage for every node, everything kept."""
    nodes = solver_nodes(classes)
    del nodes[3]
    nodes = dict(enumerate(nodes.values()))
    for node in nodes.values():
        node.args = [[index - (index > 3) for index in node.args[0]]]
    count = len(nodes)
    info = {
        "nodes": nodes,
        "loss": 4,
        "bs": 184,
        "model_name": "resnet50",
        "mode": "normal",
        "data_path": "resnet50_184_normal",
    }
    facts = {
        "r": np.eye(count, dtype=int),
        "s": np.tri(count, k=-1, dtype=int),
        "f": [defaultdict(list) for _ in nodes],
        "solve_time": 3.5,
        "runtime_expected": 1000.0,
    }
    pair = [made(classes, "SolverInfo", **info), made(classes, "CheckmateSolution", **facts)]
    return pickle.dumps(pair, protocol=protocol)
