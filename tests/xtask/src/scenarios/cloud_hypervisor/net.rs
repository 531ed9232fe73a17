//! The interface: datagrams come and go through each pair of its queues, also those of a VM whose
//! backend has come back.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use farlane_kit::network::{Network, PEER};

use super::console::Started;
use super::vmm::{PROCESSORS, Vmm};
use super::{KILLS, Part, one_with};
use crate::conditions::wait_until;
use crate::net::{GUEST, GUEST_MAC, NetBackend, socket};
use crate::run::Run;

/// Bits of VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_STATUS, VIRTIO_NET_F_CTRL_VQ and
/// VIRTIO_NET_F_MQ.
const FEATURES: u64 = 1 << 5 | 1 << 15 | 1 << 16 | 1 << 17 | 1 << 22;

/// The guest sends back through pair n what comes to this port and n
/// (`tests/xtask/guest/pvh/net.c`).
const FIRST_PORT: u16 = 7000;

const DATAGRAM: usize = 16;

/// How long a datagram may take there and back before another one is sent.
const TICK: Duration = Duration::from_millis(100);

pub struct Net<'a> {
    backend: NetBackend<'a>,
    socket: PathBuf,
    /// One for the flow of each pair.
    peers: Vec<UdpSocket>,
    /// The number of the datagram that was sent last.
    number: u64,
    /// Datagrams that were sent to the VM while it was paused, by pair.
    waiting: Vec<[u8; DATAGRAM]>,
}

/// What the guest has counted, by pair.
struct Counts {
    datagrams: Vec<u64>,
    /// To its questions who has the peer's address.
    answers: Vec<u64>,
}

impl<'a> Net<'a> {
    pub fn new(run: &Run<'_>, network: &'a Network) -> Result<Self> {
        let peers = (0..PROCESSORS).map(|_| {
            let peer = network.bind_udp((PEER, 0))?;
            peer.set_read_timeout(Some(TICK))?;
            anyhow::Ok(peer)
        });
        Ok(Self {
            backend: run.context.nets()?.serve(run, network, PROCESSORS, &[])?,
            socket: socket(run),
            peers: peers.collect::<Result<_>>()?,
            number: 0,
            waiting: Vec::new(),
        })
    }

    /// Sends a datagram to the guest in the flow of a pair.
    fn send(&mut self, pair: usize) -> Result<[u8; DATAGRAM]> {
        self.number += 1;
        let mark = self.number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut datagram = [0; DATAGRAM];
        datagram[..8].copy_from_slice(&self.number.to_le_bytes());
        datagram[8..].copy_from_slice(&mark.to_le_bytes());
        let port = FIRST_PORT + u16::try_from(pair)?;
        let sent = self.peers[pair].send_to(&datagram, (GUEST, port));
        sent.context("Cannot send to the guest")?;
        Ok(datagram)
    }

    /// Looks for one of these datagrams among what comes back in the flow of a pair.
    fn is_back(&self, pair: usize, datagrams: &[[u8; DATAGRAM]]) -> Result<bool> {
        let mut got = [0; 2 * DATAGRAM];
        loop {
            match self.peers[pair].recv(&mut got) {
                Ok(length) if datagrams.iter().any(|sent| got[..length] == *sent) => {
                    return Ok(true);
                }
                // One of before.
                Ok(length) => ensure!(length == DATAGRAM, "{length} bytes came back"),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error).context("Cannot receive from the guest"),
            }
        }
    }

    /// Has datagrams go to the guest and come back until each pair has received some of its flow:
    /// the backend has learnt where the guest sends it from.
    fn exchange(&mut self, vmm: &mut Vmm) -> Result<()> {
        for pair in 0..self.peers.len() {
            let begin = Counts::of(vmm)?.datagrams;
            // On a busy machine one takes longer than it is waited for.
            let mut sent = Vec::new();
            wait_until(
                &format!("pair {pair} receives, and what it sends arrives"),
                || {
                    sent.push(self.send(pair)?);
                    Ok(
                        self.is_back(pair, &sent)?
                            && Counts::of(vmm)?.datagrams[pair] > begin[pair],
                    )
                },
            )
            .with_context(|| self.state(vmm, &begin))?;
        }
        vmm.ask("net-settle")?;
        Ok(())
    }

    /// Has the guest ask through each pair who has the peer's address until it was answered as
    /// often.
    fn ask(vmm: &mut Vmm) -> Result<()> {
        let begin: u64 = Counts::of(vmm)?.answers.iter().sum();
        wait_until("the guest's questions are answered", || {
            vmm.ask("net-ask")?;
            vmm.ask("net-settle")?;
            let answers: u64 = Counts::of(vmm)?.answers.iter().sum();
            Ok(answers >= begin + u64::from(PROCESSORS))
        })
    }

    /// What is known when something did not come.
    fn state(&self, vmm: &mut Vmm, begin: &[u64]) -> String {
        let now = Counts::of(vmm).map(|counts| counts.datagrams);
        let counters = ["rx_frames", "tx_frames", "rx_dropped", "broken_queues"];
        let counted: BTreeMap<&str, _> = counters
            .into_iter()
            .map(|name| {
                let counted = self.backend.metrics().and_then(|all| all.sum(name));
                (name, counted.ok())
            })
            .collect();
        format!("The guest had received {begin:?}, and now {now:?}; the backend counts {counted:?}")
    }
}

impl Counts {
    /// Those of now.
    fn of(vmm: &mut Vmm) -> Result<Self> {
        Self::parse(&vmm.ask("net-count")?)
    }

    /// Of a line such as `pairs 2 datagrams 3 4 0 0 answers 1 0 0 0`.
    fn parse(said: &str) -> Result<Self> {
        let words: Vec<&str> = said.split(' ').collect();
        let behind = |name: &str| -> Result<Vec<u64>> {
            let at = words.iter().position(|word| *word == name);
            let at = at.with_context(|| format!("No {name} in {said:?}"))?;
            let numbers = words[at + 1..].iter().map_while(|word| word.parse().ok());
            Ok(numbers.collect())
        };
        let (datagrams, answers) = (behind("datagrams")?, behind("answers")?);
        ensure!(
            behind("pairs")? == [u64::from(PROCESSORS)]
                && datagrams.len() >= usize::try_from(PROCESSORS)?,
            "The guest counts {said:?}"
        );
        Ok(Self { datagrams, answers })
    }
}

impl Part for Net<'_> {
    fn name(&self) -> &'static str {
        "farlane-net"
    }

    fn words(&self) -> Vec<OsString> {
        let (socket, queues) = (self.socket.display(), 2 * PROCESSORS);
        let net = format!(
            "vhost_user=true,socket={socket},num_queues={queues},queue_size=256,\
             mac={GUEST_MAC},id=net0"
        );
        vec!["--net".into(), net.into()]
    }

    fn agreed(&self, devices: &[Started]) -> Result<String> {
        // Cloud Hypervisor adds a control queue, which it serves itself.
        let agreed = one_with(devices, "virtio-1", 2 * PROCESSORS + 1, FEATURES)?;
        Ok(format!("interface: {agreed}"))
    }

    fn paused(&mut self) -> Result<()> {
        for pair in 0..self.peers.len() {
            let sent = self.send(pair)?;
            self.waiting.push(sent);
        }
        Ok(())
    }

    fn kept(&mut self, _: &mut Vmm) -> Result<()> {
        for (pair, sent) in std::mem::take(&mut self.waiting).iter().enumerate() {
            wait_until("what was sent to a paused VM comes back from it", || {
                self.is_back(pair, std::slice::from_ref(sent))
            })?;
        }
        Ok(())
    }

    fn works(&mut self, vmm: &mut Vmm) -> Result<()> {
        Self::ask(vmm)?;
        self.exchange(vmm)
    }

    fn kill(&mut self, vmm: &mut Vmm) -> Result<String> {
        self.exchange(vmm)?;
        self.backend.freeze()?;
        // It takes them no more.
        vmm.ask("net-ask")?;
        self.backend.kill()?;
        self.backend.start_again()?;
        // The next one takes what was sent meanwhile, and goes on with buffers that the driver was
        // not given back.
        vmm.ask("net-settle")?;
        self.exchange(vmm)?;
        Self::ask(vmm)?;
        Ok(format!(
            "{KILLS} times: what was sent meanwhile is sent; each pair receives and sends"
        ))
    }

    fn end(self: Box<Self>) -> Result<()> {
        let broken = self.backend.metrics()?.sum("broken_queues")?;
        ensure!(broken == 0, "{broken} queues made no sense");
        self.backend.stop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_guest_counts_is_read() {
        let counts = Counts::parse("pairs 2 datagrams 3 4 0 0 answers 1 0 0 0").unwrap();
        assert_eq!(counts.datagrams, [3, 4, 0, 0]);
        assert_eq!(counts.answers, [1, 0, 0, 0]);
        assert!(Counts::parse("pairs 1 datagrams 3 answers 1").is_err());
    }
}
