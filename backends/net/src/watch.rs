//! Links that go up and down.

use crate::interface::Interface;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Pause between two looks.
const LOOK: Duration = Duration::from_millis(500);

/// Looks at interfaces now and then, from a thread of its own.
pub fn watch(interfaces: Vec<Arc<Interface>>) -> io::Result<()> {
    std::thread::Builder::new()
        .name("links".to_owned())
        .spawn(move || {
            loop {
                std::thread::sleep(LOOK);
                interfaces.iter().for_each(|interface| interface.look());
            }
        })
        .map(drop)
}
