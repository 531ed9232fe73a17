//! The targets: one file each.

use crate::Target;

macro_rules! targets {
    ($($name:ident)*) => {
        $(pub mod $name;)*

        /// All targets, by name.
        pub const ALL: &[Target] = &[$(Target { name: stringify!($name), run: $name::run }),*];
    };
}

targets! {
    broker
    call_ring
    control_queue
    flow_parse
    gpu_command
    lending
    net_control
    nvme_command
    token_page
    vfio_user
    vhost_session
    virtio_blk
    work_request
}
