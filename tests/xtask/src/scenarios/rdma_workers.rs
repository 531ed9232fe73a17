//! The scenarios of virtual RDMA with two worker threads: what one context waits for is posted in
//! another, which another thread serves.

use super::{
    Scenario, rdma_buffers, rdma_crash, rdma_host, rdma_isolation, rdma_perftest, rdma_pingpong,
};

macro_rules! with_two_workers {
    ($($constant:ident: $scenario:ident, $name:literal, $about:literal, $is_test:literal, $is_brief:literal;)*) => {$(
        pub const $constant: Scenario = Scenario {
            name: $name,
            about: $about,
            is_test: $is_test,
            run: |run, report| {
                run.use_workers(2);
                if $is_brief {
                    run.be_brief();
                }
                $scenario::run(run, report)
            },
        };
    )*};
}

with_two_workers! {
    BUFFERS: rdma_buffers, "rdma-buffers-workers", "rdma-buffers with two worker threads", true, false;
    ISOLATION: rdma_isolation, "rdma-isolation-workers", "rdma-isolation with two worker threads", true, false;
    PINGPONG: rdma_pingpong, "rdma-pingpong-workers", "rdma-pingpong with two worker threads", true, false;
    CRASH: rdma_crash, "rdma-crash-workers", "rdma-crash with two worker threads, half as many kills", true, true;
    CRASH_LONG: rdma_crash, "rdma-crash-workers-long", "rdma-crash with two worker threads", false, false;
    HOST: rdma_host, "rdma-host-workers", "rdma-host with two worker threads, one size where that has all", true, true;
    HOST_LONG: rdma_host, "rdma-host-workers-long", "rdma-host with two worker threads", false, false;
    PERFTEST: rdma_perftest, "rdma-perftest-workers", "rdma-perftest with two worker threads, one size where that has all", true, true;
    PERFTEST_LONG: rdma_perftest, "rdma-perftest-workers-long", "rdma-perftest with two worker threads", false, false;
}
