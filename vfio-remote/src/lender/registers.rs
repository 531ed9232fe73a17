//! One session at the lender: registers and interrupts of its device.

use super::posted::FlushingSignal;
use super::session::MessageSignal;
use super::worker::{Answer, HeldDevice, Worker};
use crate::protocol::message::{Delivery, Fence, MAX_DATA_BYTES, MAX_VECTORS, Refusal, Reply};
use farlane_abi::width::to_usize;
use farlane_pci::{AccessError, EventSignal, InterruptKind, Region, Signal};
use farlane_sys::{chain, eventfd};
use std::os::fd::OwnedFd;
use std::sync::Arc;

impl Worker {
    /// Checks an access to a region.
    fn access(
        &mut self,
        fence: Fence,
        region: Region,
        offset: u64,
        length: usize,
    ) -> Result<&HeldDevice, Refusal> {
        let (attached, held) = self.held(fence)?;
        let description = attached.device.offer.source.description();
        if length == 0 || length > MAX_DATA_BYTES || !description.contains(region, offset, length) {
            return Err(Refusal::Invalid(format!(
                "{length:#x} bytes at {offset:#x} of {region:?}"
            )));
        }
        Ok(held)
    }

    pub(super) fn read(
        &mut self,
        fence: Fence,
        region: Region,
        offset: u64,
        length: u32,
    ) -> Answer {
        let length = to_usize(length.into());
        let held = self.access(fence, region, offset, length)?;
        let mut data = vec![0; length];
        held.function
            .read(region, offset, &mut data)
            .map_err(device_error)?;
        Ok(Reply::Data(data))
    }

    pub(super) fn write(
        &mut self,
        fence: Fence,
        region: Region,
        offset: u64,
        data: &[u8],
    ) -> Result<(), Refusal> {
        let held = self.access(fence, region, offset, data.len())?;
        held.function
            .write(region, offset, data)
            .map_err(device_error)
    }

    pub(super) fn set_interrupts(
        &mut self,
        fence: Fence,
        kind: InterruptKind,
        first: u16,
        deliveries: &[Delivery],
        descriptors: Vec<OwnedFd>,
    ) -> Answer {
        let control = Arc::downgrade(&self.control);
        let (attached, held) = self.held(fence)?;
        let interrupts = attached.device.offer.source.description().interrupts;
        let named = interrupts.vectors(kind, first, deliveries.len());
        let Some(vectors) = named.filter(|_| deliveries.len() <= MAX_VECTORS) else {
            return Err(Refusal::Invalid(format!(
                "There are {} {kind:?} vectors, not {} from {first} on",
                interrupts.count(kind),
                deliveries.len()
            )));
        };
        let mut descriptors = descriptors.into_iter();
        for (vector, delivery) in vectors.into_iter().zip(deliveries) {
            let signal: Option<Arc<dyn Signal>> = match delivery {
                Delivery::Off => None,
                Delivery::Message => Some(Arc::new(MessageSignal {
                    control: control.clone(),
                    fence,
                    vector,
                })),
                Delivery::Eventfd => {
                    let missing = || Refusal::Invalid("A descriptor is missing".to_owned());
                    let fd = descriptors.next().ok_or_else(missing)?;
                    let fd = eventfd::adopt(fd).map_err(|e| Refusal::Invalid(chain(&e)))?;
                    Some(Arc::new(EventSignal::new(fd)))
                }
            };
            let ordered = signal.map(|signal| -> Arc<dyn Signal> {
                let written = Arc::clone(&held.written);
                Arc::new(FlushingSignal { written, signal })
            });
            held.function
                .set_interrupt(vector, ordered)
                .map_err(device_error)?;
        }
        Ok(Reply::Done)
    }
}

/// What a borrower is told.
pub(super) fn device_error(error: AccessError) -> Refusal {
    match error {
        AccessError::Io(_) => Refusal::Device(chain(&error)),
        _ => Refusal::Invalid(chain(&error)),
    }
}
