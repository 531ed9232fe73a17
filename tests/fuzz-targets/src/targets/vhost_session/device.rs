//! A device that checks what it is asked, and serves its queues like a worker.

use super::{FEATURES, QUEUES};
use farlane_sys::eventfd;
use farlane_vhost_user::bits::feature;
use farlane_vhost_user::chain::Chain;
use farlane_vhost_user::segment::take_last_byte;
use farlane_vhost_user::session::{Device, PROTOCOL_FEATURES, Setup};
use farlane_vhost_user::vring::{Progress, Rings};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard};
use vhost::vhost_user::{Error, VhostUserProtocolFeatures};

/// A queue in use.
pub struct Running {
    setup: Setup,
    /// None until its first turn.
    progress: Option<Progress>,
    broken: bool,
}

/// What the device and its queues have in common.
#[derive(Default)]
pub struct State {
    pub running: BTreeMap<u16, Running>,
    features: u64,
    config: [u8; 16],
}

/// A device that checks what it is asked.
pub struct Checked(pub Arc<Mutex<State>>);

pub fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no panic")
}

impl Device for Checked {
    type Worker = u16;

    fn name(&self) -> String {
        "fuzz".to_owned()
    }

    fn queues(&self) -> u16 {
        QUEUES
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        PROTOCOL_FEATURES | VhostUserProtocolFeatures::INFLIGHT_SHMFD
    }

    fn negotiated(&mut self, features: u64) {
        assert_eq!(features & !FEATURES, 0, "features that were not offered");
        lock(&self.0).features = features;
    }

    fn reset(&mut self) {
        assert!(
            lock(&self.0).running.is_empty(),
            "a reset with queues in use"
        );
    }

    fn config(&self) -> Vec<u8> {
        lock(&self.0).config.to_vec()
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8]) -> vhost::vhost_user::Result<()> {
        let mut state = lock(&self.0);
        let start = usize::try_from(offset).expect("64 bits");
        let place = start
            .checked_add(bytes.len())
            .and_then(|end| state.config.get_mut(start..end))
            .ok_or(Error::InvalidParam)?;
        place.copy_from_slice(bytes);
        Ok(())
    }

    fn start(&mut self, setup: Setup) -> io::Result<u16> {
        let mut state = lock(&self.0);
        let index = setup.index;
        assert!(index < QUEUES);
        assert_eq!(setup.event_index, state.features & feature::EVENT_IDX != 0);
        let running = Running {
            setup,
            progress: None,
            broken: false,
        };
        let before = state.running.insert(index, running);
        assert!(before.is_none(), "queue {index} is started twice");
        Ok(index)
    }

    fn stop(&mut self, index: u16) -> u16 {
        let running = lock(&self.0).running.remove(&index);
        let running = running.expect("a queue that was started");
        match running.progress {
            Some(progress) => progress.next_available,
            None => running.setup.next_available,
        }
    }
}

impl Running {
    /// Serves it once, like a worker.
    pub fn turn(&mut self) {
        if self.broken {
            return;
        }
        if let Some(kick) = &self.setup.kick {
            let _ = eventfd::drain(kick.as_fd());
        }
        if let Err(error) = self.serve() {
            log::warn!("{}", farlane_sys::chain(&*error));
            self.setup.error.signal();
            self.broken = true;
        }
    }

    fn serve(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let rings = Rings::map(self.setup.space.view(), &self.setup.layout)?;
        let size = self.setup.layout.size;
        if self.progress.is_none() {
            let used = rings.used_index();
            let mut next = self.setup.next_available;
            if let Some(inflight) = &mut self.setup.inflight {
                let left = inflight.recover(used);
                assert!(left.len() <= usize::from(size) && left.iter().all(|&head| head < size));
                next = used.wrapping_add(u16::try_from(left.len()).expect("few"));
                for &head in &left {
                    inflight.prepare(head);
                }
                inflight.end(&left, used);
            }
            self.progress = Some(Progress::new(self.setup.event_index, next, used));
        }
        let Some(progress) = &mut self.progress else {
            return Ok(());
        };
        let mut chain = Chain::default();
        let mut batch = Vec::new();
        for _ in 0..size {
            let Some(head) = progress.take(&rings)? else {
                break;
            };
            if let Some(inflight) = &mut self.setup.inflight {
                inflight.begin(head);
            }
            chain.follow(&rings, head)?;
            if let Some(address) = take_last_byte(&mut chain.writable) {
                let _ = rings.view().write(address, &[0xa5]);
            }
            if let Some(inflight) = &mut self.setup.inflight {
                inflight.prepare(head);
            }
            progress.put(&rings, head, 1);
            batch.push(head);
        }
        let told = progress.has_unpublished();
        progress.publish(&rings);
        if let Some(inflight) = &mut self.setup.inflight {
            inflight.end(&batch, rings.used_index());
        }
        if told && progress.must_tell(&rings) {
            self.setup.call.signal();
        }
        progress.ask_to_be_told(&rings);
        Ok(())
    }
}
