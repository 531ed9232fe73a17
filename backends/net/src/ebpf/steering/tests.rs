#![allow(clippy::unwrap_used)]

use super::*;
use crate::flow::parse;
use std::os::fd::{AsFd as _, FromRawFd as _};

/// A tap with several queues in a network namespace of its own, which goes with the thread.
struct Tap {
    queues: Vec<OwnedFd>,
    sender: OwnedFd,
    index: i32,
}

fn check(result: i32) -> i32 {
    assert!(result >= 0, "{}", io::Error::last_os_error());
    result
}

impl Tap {
    fn new(queues: usize) -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "taps are made in a network namespace: run this as root"
        );
        // SAFETY: concerns this thread alone.
        check(unsafe { libc::unshare(libc::CLONE_NEWNET) });
        // SAFETY: all zeroes is an ifreq.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(b"steer0") {
            *to = i8::try_from(*from).unwrap();
        }
        // IFF_TAP, IFF_NO_PI, IFF_MULTI_QUEUE.
        request.ifr_ifru.ifru_flags = 0x1102;
        let fds = (0..queues)
            .map(|_| {
                // SAFETY: a plain path; the descriptor is new.
                let fd = unsafe {
                    let fd = libc::open(c"/dev/net/tun".as_ptr(), libc::O_RDWR | libc::O_NONBLOCK);
                    OwnedFd::from_raw_fd(check(fd))
                };
                // SAFETY: TUNSETIFF takes an ifreq.
                check(unsafe { libc::ioctl(fd.as_raw_fd(), 0x4004_54ca, &raw mut request) });
                fd
            })
            .collect();
        // SAFETY: the descriptor is new.
        let sender = unsafe {
            OwnedFd::from_raw_fd(check(libc::socket(libc::AF_PACKET, libc::SOCK_RAW, 0)))
        };
        request.ifr_ifru.ifru_flags = 1;
        // SAFETY: both requests take an ifreq.
        let index = unsafe {
            check(libc::ioctl(
                sender.as_raw_fd(),
                libc::SIOCSIFFLAGS,
                &raw mut request,
            ));
            check(libc::ioctl(
                sender.as_raw_fd(),
                libc::SIOCGIFINDEX,
                &raw mut request,
            ));
            request.ifr_ifru.ifru_ifindex
        };
        Self {
            queues: fds,
            sender,
            index,
        }
    }

    /// Sends a frame from the host's side; returns the queue on which it comes out.
    fn send(&self, frame: &[u8]) -> usize {
        // SAFETY: all zeroes is an address; it lives throughout the call, as the frame does.
        let sent = unsafe {
            let mut to: libc::sockaddr_ll = std::mem::zeroed();
            to.sll_family = u16::try_from(libc::AF_PACKET).unwrap();
            to.sll_ifindex = self.index;
            to.sll_halen = 6;
            libc::sendto(
                self.sender.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const to).cast(),
                u32::try_from(size_of_val(&to)).unwrap(),
            )
        };
        assert_eq!(usize::try_from(sent).unwrap(), frame.len());
        let mut bytes = [0; 2048];
        loop {
            for (queue, fd) in self.queues.iter().enumerate() {
                if let Ok(got) = rustix::io::read(fd, &mut bytes)
                    && bytes[..got] == *frame
                {
                    return queue;
                }
            }
            std::thread::yield_now();
        }
    }
}

fn ethernet(tags: &[[u8; 4]], ether_type: [u8; 2]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    for tag in tags {
        frame.extend(tag);
    }
    frame.extend(ether_type);
    frame
}

fn ipv4(tags: &[[u8; 4]], options: u8, protocol: u8, port: u16) -> Vec<u8> {
    let mut frame = ethernet(tags, [8, 0]);
    let bytes = 20 + 4 * options;
    frame.extend([
        0x45 + options,
        0,
        0,
        bytes + 20,
        0,
        0,
        0,
        0,
        64,
        protocol,
        0,
        0,
    ]);
    frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
    frame.extend(vec![1; usize::from(options) * 4]);
    frame.extend(port.to_be_bytes());
    frame.extend([0, 80]);
    frame.extend([0; 16]);
    frame
}

fn ipv6(protocol: u8, port: u16) -> Vec<u8> {
    let mut frame = ethernet(&[], [0x86, 0xdd]);
    frame.extend([0x60, 0, 0, 0, 0, 20, protocol, 64]);
    frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
    frame.extend(port.to_be_bytes());
    frame.extend([0, 80]);
    frame.extend([0; 16]);
    frame
}

#[test]
fn a_steered_flow_comes_out_of_its_queue_and_others_stay_where_they_are() {
    let tap = Tap::new(4);
    let steering = TapSteering::new(4).unwrap();
    steering.attach(tap.queues[0].as_fd()).unwrap();
    let frames = [
        ipv4(&[], 0, 6, 1),
        ipv4(&[], 3, 17, 2),
        ipv4(&[[0x81, 0, 0, 5]], 0, 6, 3),
        ipv4(&[[0x88, 0xa8, 0, 5], [0x81, 0, 0, 6]], 1, 17, 4),
        ipv6(6, 5),
        ipv6(17, 6),
        ipv4(&[], 0, 132, 7),
    ];
    for frame in &frames {
        let other = tap.send(&ipv4(&[], 0, 6, 999));
        let flow = parse(frame).flow.unwrap();
        let first = tap.send(frame);
        assert_eq!(tap.send(frame), first, "stable");
        for queue in [3, 1, 2, 0] {
            steering.steer(&flow, Some(queue)).unwrap();
            assert_eq!(tap.send(frame), usize::from(queue), "{flow:?}");
        }
        steering.steer(&flow, None).unwrap();
        steering.steer(&flow, None).unwrap();
        assert_eq!(tap.send(frame), first);
        assert_eq!(tap.send(&ipv4(&[], 0, 6, 999)), other);
    }
}

#[test]
fn flows_that_are_forgotten_go_where_they_went_before_they_were_steered() {
    let tap = Tap::new(4);
    let steering = TapSteering::new(4).unwrap();
    steering.attach(tap.queues[0].as_fd()).unwrap();
    steering.forget().unwrap();
    let frames: Vec<_> = (0..300).map(|port| ipv4(&[], 0, 17, port)).collect();
    let before: Vec<_> = frames.iter().map(|frame| tap.send(frame)).collect();
    for (frame, queue) in frames.iter().zip(&before) {
        let flow = parse(frame).flow.unwrap();
        let other = u16::try_from((queue + 1) % 4).unwrap();
        steering.steer(&flow, Some(other)).unwrap();
    }
    let others: Vec<_> = before.iter().map(|queue| (queue + 1) % 4).collect();
    let sent = || -> Vec<_> { frames.iter().map(|frame| tap.send(frame)).collect() };
    assert_eq!(sent(), others);
    steering.forget().unwrap();
    assert_eq!(sent(), before);
}

#[test]
fn unknown_flows_are_spread_over_the_queues_that_there_are() {
    let tap = Tap::new(4);
    let steering = TapSteering::new(4).unwrap();
    steering.attach(tap.queues[0].as_fd()).unwrap();
    let mut seen = [0; 4];
    for port in 0..400 {
        seen[tap.send(&ipv4(&[], 0, 17, port))] += 1;
    }
    assert!(seen.iter().all(|count| *count > 40), "{seen:?}");
    steering.set_queues(2).unwrap();
    for port in 0..100 {
        assert!(tap.send(&ipv6(6, port)) < 2);
    }
    // So do flows that are steered to a queue that is not in use, until it is again.
    let flow = parse(&ipv6(6, 1)).flow.unwrap();
    for queue in [1, 3] {
        steering.steer(&flow, Some(queue)).unwrap();
        let unused = queue > 1;
        let at = tap.send(&ipv6(6, 1));
        assert!(if unused {
            at < 2
        } else {
            at == usize::from(queue)
        });
    }
    steering.set_queues(4).unwrap();
    assert_eq!(tap.send(&ipv6(6, 1)), 3);
    // What is no IP goes to the first.
    let mut arp = ethernet(&[], [8, 6]);
    arp.extend([0; 46]);
    assert_eq!(tap.send(&arp), 0);
    detach(tap.queues[0].as_fd()).unwrap();
}
