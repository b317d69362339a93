# SPDX-License-Identifier: Apache-2.0
"""The workloads of ``benchmarks.workloads``: a module per workload, in it a function per system that can do it."""
