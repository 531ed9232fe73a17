//! The scenarios of virtual RDMA with two worker threads: what one context waits for is posted in another, which another thread serves.

use super::{
    Scenario, rdma_buffers, rdma_crash, rdma_host, rdma_isolation, rdma_perftest, rdma_pingpong,
};

pub const BUFFERS: Scenario = Scenario {
    name: "rdma-buffers-workers",
    about: "rdma-buffers with two worker threads",
    is_test: true,
    run: |run, report| {
        run.use_workers(2);
        rdma_buffers::run(run, report)
    },
};

pub const CRASH: Scenario = Scenario {
    name: "rdma-crash-workers",
    about: "rdma-crash with two worker threads",
    is_test: true,
    run: |run, report| {
        run.use_workers(2);
        rdma_crash::run(run, report)
    },
};

pub const HOST: Scenario = Scenario {
    name: "rdma-host-workers",
    about: "rdma-host with two worker threads",
    is_test: true,
    run: |run, report| {
        run.use_workers(2);
        rdma_host::run(run, report)
    },
};

pub const ISOLATION: Scenario = Scenario {
    name: "rdma-isolation-workers",
    about: "rdma-isolation with two worker threads",
    is_test: true,
    run: |run, report| {
        run.use_workers(2);
        rdma_isolation::run(run, report)
    },
};

pub const PERFTEST: Scenario = Scenario {
    name: "rdma-perftest-workers",
    about: "rdma-perftest with two worker threads",
    is_test: true,
    run: |run, report| {
        run.use_workers(2);
        rdma_perftest::run(run, report)
    },
};

pub const PINGPONG: Scenario = Scenario {
    name: "rdma-pingpong-workers",
    about: "rdma-pingpong with two worker threads",
    is_test: true,
    run: |run, report| {
        run.use_workers(2);
        rdma_pingpong::run(run, report)
    },
};
