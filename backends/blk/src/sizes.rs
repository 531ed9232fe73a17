//! Files that grow and shrink, and memory that moves from node to node.

use crate::disk::Disk;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Pause between two looks.
const LOOK: Duration = Duration::from_secs(1);

/// Looks at the sizes of disks now and then, and where the memory of their VMs lies, from a thread of its own.
///
/// # Errors
/// When the thread cannot be started.
pub fn watch(disks: Vec<Arc<Disk>>) -> io::Result<()> {
    std::thread::Builder::new()
        .name("sizes".to_owned())
        .spawn(move || {
            loop {
                std::thread::sleep(LOOK);
                for disk in &disks {
                    disk.look_at_size();
                    disk.look_at_placements();
                }
            }
        })
        .map(drop)
}
