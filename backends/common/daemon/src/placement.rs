//! Where the memory of a VM lies, for a device that is served on several NUMA nodes.

use farlane_zero_copy::AddressSpace;
use farlane_zero_copy::placement::{Given, Placement, Watch};
use farlane_zero_copy::topology::Topology;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// How often it is looked where the memory lies: the kernel moves pages.
const EVERY: Duration = Duration::from_secs(1);

/// The placement of one VM's memory, kept up to date by a thread as long as this lives.
#[derive(Debug, Default)]
pub struct VmPlacement(Option<(Arc<Placement>, Option<Watch>)>);

impl VmPlacement {
    /// The placement of the memory in `space`, as far as it is known by now. To be called when a
    /// queue starts, which is after memory has come: all of it is looked at aside, for the VMM
    /// waits for its queue.
    ///
    /// # Errors
    /// There are no more threads.
    pub fn look(
        &mut self,
        space: &Arc<AddressSpace>,
        topology: &Topology,
        given: &[Given],
    ) -> io::Result<Arc<Placement>> {
        let (placement, watch) = match self.0.take() {
            Some(followed) => followed,
            None => {
                let space = Arc::clone(space);
                let placement = Placement::unseen(space, topology.clone(), given.to_vec());
                let watch = placement.watch(EVERY)?;
                (placement, watch)
            }
        };
        if let Some(watch) = &watch {
            watch.look();
        }
        Ok(Arc::clone(&self.0.insert((placement, watch)).0))
    }
}
