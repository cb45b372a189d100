"""Files as MONeT's solver writes them."""

import pickle
import sys
import types
from collections import defaultdict

import numpy as np

FORWARD = ("aten::_convolution", "aten::batch_norm", "aten::relu_", "int::ReLUInt", "aten::addmm")


def monet_classes(monkeypatch):
    """Classes where MONeT has them, for as long as a test lasts."""
    found = {}
    for module, names in {
        "monet": (),
        "monet.solver_info": ("SolverInfo", "FwdNode", "BwdNode", "IntNode"),
        "monet.cvxpy_solver": ("Solution",),
        "monet.graph": ("ComputeNode",),
    }.items():
        made = types.ModuleType(module)
        for name in names:
            found[name] = type(name, (), {"__module__": module})
            setattr(made, name, found[name])
        monkeypatch.setitem(sys.modules, module, made)
    return found


def solution(classes, protocol=4, **changes):
    """A solution as MONeT's solver writes it, for five forward operators and four backward ones."""

    def make(name, **attributes):
        made = classes[name]()
        vars(made).update(attributes)
        return made

    loss, backward = len(FORWARD), 4
    nodes = {}
    for index, op in enumerate(FORWARD):
        kind = "IntNode" if op.startswith("int::") else "FwdNode"
        gnode = make("ComputeNode", op=op, shape=[-1, 4])
        nodes[index] = make(
            kind, op=op, gnode=gnode, local_tensors={0, 1}, workspace_compute=[0.5], mem=np.int64(9)
        )
    nodes[loss] = make("FwdNode", op="loss::loss")
    for index in range(loss + 1, loss + 1 + backward):
        nodes[index] = make("BwdNode", op="aten::relu__ip_grad", fwd_id=0)
    stages = len(nodes) - loss
    r = np.zeros((stages, loss + 1))
    r[0] = 1
    r[2, 1] = r[3, 1] = r[3, 2] = 1
    s = np.zeros((stages + 1, loss + 1))
    s[1, [0, 4]] = 1
    info = {
        "nodes": nodes,
        "loss": loss,
        "bs": 184,
        "model_name": "resnet50",
        "mode": "inplace_conv_multiway_newnode",
        "deps": defaultdict(list, {1: [2]}),
    }
    facts = {
        "r": r,
        "s": np.asfortranarray(s),
        "m": r,
        "solve_time": 86400.5,
        "runtime_expected": np.float64(96105.0),
    }
    info.update({name: value for name, value in changes.items() if name in info})
    facts.update({name: value for name, value in changes.items() if name in facts})
    return pickle.dumps([make("SolverInfo", **info), make("Solution", **facts)], protocol=protocol)
