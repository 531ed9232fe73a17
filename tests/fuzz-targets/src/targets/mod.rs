//! The targets: one file each.

use crate::Target;

/// Gives the names of all targets to a macro.
#[macro_export]
macro_rules! for_all_targets {
    ($then:ident) => {
        $then! {
            broker
            call_ring
            connection_manager
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
    };
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(pub mod $name;)*

        /// All targets, by name.
        pub const ALL: &[Target] = &[$(Target { name: stringify!($name), run: $name::run }),*];
    };
}

for_all_targets!(targets);
