"""Every private symbol of torch that monetlite uses; no other package of monetlite may name one.

A file for each subject. Each symbol stands there with its use and with what breaks when it changes; the tests in
`tests/fx/torch_internals` fail when one is missing or behaves in another way, on the oldest and the newest torch
that is supported.
"""
