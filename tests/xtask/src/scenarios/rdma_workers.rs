//! The scenarios of virtual RDMA with two worker threads: what one context waits for is posted in another, which another thread serves.

use super::{
    Scenario, rdma_buffers, rdma_crash, rdma_host, rdma_isolation, rdma_perftest, rdma_pingpong,
};

macro_rules! with_two_workers {
    ($($constant:ident: $scenario:ident, $name:literal;)*) => {$(
        pub const $constant: Scenario = Scenario {
            name: concat!($name, "-workers"),
            about: concat!($name, " with two worker threads"),
            is_test: true,
            run: |run, report| {
                run.use_workers(2);
                $scenario::run(run, report)
            },
        };
    )*};
}

with_two_workers! {
    BUFFERS: rdma_buffers, "rdma-buffers";
    CRASH: rdma_crash, "rdma-crash";
    HOST: rdma_host, "rdma-host";
    ISOLATION: rdma_isolation, "rdma-isolation";
    PERFTEST: rdma_perftest, "rdma-perftest";
    PINGPONG: rdma_pingpong, "rdma-pingpong";
}
