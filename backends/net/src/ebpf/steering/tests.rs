#![allow(clippy::unwrap_used)]

use super::*;
use crate::flow::parse;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
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
            *to = libc::c_char::try_from(*from).unwrap();
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
        self.send_as(frame, frame)
    }

    /// The same of a frame that comes as another one.
    fn send_as(&self, frame: &[u8], comes: &[u8]) -> usize {
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
                    && bytes[..got] == *comes
                {
                    return queue;
                }
            }
            std::thread::yield_now();
        }
    }
}

/// `bpf(2)` with the words of a command.
fn bpf(command: i32, words: &[u32]) -> OwnedFd {
    // SAFETY: the kernel reads the words, and what they point to lives throughout the call; the
    // descriptor is new.
    unsafe {
        let fd = libc::syscall(libc::SYS_bpf, command, words.as_ptr(), size_of_val(words));
        OwnedFd::from_raw_fd(check(i32::try_from(fd).unwrap()))
    }
}

fn halves(address: usize) -> [u32; 2] {
    let address = u64::try_from(address).unwrap();
    [address, address >> 32].map(|half| u32::try_from(half & 0xffff_ffff).unwrap())
}

/// A program before the tap that puts a tag of VLAN `id` on frames with the mark, aside, as an
/// interface of the VLAN does.
fn tag_marked(tap: &Tap, mark: i32, id: i32) -> OwnedFd {
    /// `mark` of `struct __sk_buff`, and `bpf_skb_vlan_push`.
    const MARK: i16 = 8;
    const PUSH: i32 = 18;
    let mut program = Assembler::new();
    program
        .load(Width::Word, R8, R1, MARK)
        .jump_when(When::NotEqual, R8, mark, "go on")
        .by(Operation::Move, R2, half([0x81, 0x00]))
        .by(Operation::Move, R3, id)
        .call(PUSH)
        .label("go on")
        .by(Operation::Move, R0, 0)
        .exit();
    let code = program.finish().unwrap();
    let [low, high] = halves(code.as_ptr().addr());
    let [licence, rest] = halves(c"Dual BSD/GPL".as_ptr().addr());
    // BPF_PROG_LOAD of a BPF_PROG_TYPE_SCHED_CLS.
    let instructions = u32::try_from(code.len()).unwrap();
    let loaded = bpf(
        5,
        &[3, instructions, low, high, licence, rest, 0, 0, 0, 0, 0, 0],
    );
    // BPF_LINK_CREATE at BPF_TCX_EGRESS.
    let numbers = [loaded.as_raw_fd(), tap.index].map(|n| u32::try_from(n).unwrap());
    bpf(28, &[numbers[0], numbers[1], 47, 0])
}

/// Frames that are sent from now on have this mark.
fn mark(tap: &Tap, mark: i32) {
    // SAFETY: the option is a number, which lives throughout the call.
    check(unsafe {
        libc::setsockopt(
            tap.sender.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MARK,
            (&raw const mark).cast(),
            4,
        )
    });
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
    let steering = TapSteering::new(PairCount(4)).unwrap();
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
            steering.steer(&flow, Some(PairId(queue))).unwrap();
            assert_eq!(tap.send(frame), usize::from(queue), "{flow:?}");
        }
        steering.steer(&flow, None).unwrap();
        steering.steer(&flow, None).unwrap();
        assert_eq!(tap.send(frame), first);
        assert_eq!(tap.send(&ipv4(&[], 0, 6, 999)), other);
    }
}

#[test]
fn what_differs_by_vlan_alone_is_two_flows() {
    let tap = Tap::new(4);
    let steering = TapSteering::new(PairCount(4)).unwrap();
    steering.attach(tap.queues[0].as_fd()).unwrap();
    let frame = |tags: &[[u8; 4]]| ipv4(tags, 0, 6, 1);
    let tag = |low| [0x81, 0, 0x20, low];
    let all = [
        frame(&[]),
        frame(&[tag(5)]),
        frame(&[tag(6)]),
        frame(&[[0x88, 0xa8, 0, 5], tag(6)]),
        frame(&[[0x88, 0xa8, 0, 5], tag(7)]),
    ];
    let flows: Vec<_> = all.iter().map(|frame| parse(frame).flow.unwrap()).collect();
    let _link = tag_marked(&tap, 7, 5);
    for (index, frame) in all.iter().enumerate() {
        for flow in &flows {
            steering.steer(flow, Some(PairId(1))).unwrap();
        }
        steering.steer(&flows[index], Some(PairId(2))).unwrap();
        let queue = |is: usize| if is == index { 2 } else { 1 };
        for (other, frame) in all.iter().enumerate() {
            assert_eq!(tap.send(frame), queue(other));
        }
        assert_eq!(
            parse(frame).flow.unwrap().reversed().reversed(),
            flows[index]
        );
        // The kernel has the tag aside until the frame is read.
        mark(&tap, 7);
        for (sent, is) in [(0, 1), (2, 3)] {
            let comes = [&all[sent][..12], &[0x81, 0, 0, 5], &all[sent][12..]].concat();
            assert_eq!(parse(&comes).flow.unwrap(), flows[is]);
            assert_eq!(tap.send_as(&all[sent], &comes), queue(is));
        }
        mark(&tap, 0);
    }
    // A tag for its priority alone is none.
    let urgent = frame(&[[0x81, 0, 0xe0, 0]]);
    assert_eq!(parse(&urgent).flow, Some(flows[0]));
    steering.steer(&flows[0], Some(PairId(3))).unwrap();
    assert_eq!(tap.send(&urgent), 3);
}

/// A header of an IPv6 packet, and the number of its kind: its first byte is to be the next one's.
#[derive(Clone, Debug)]
struct Extension(u8, Vec<u8>);

fn extension() -> impl Strategy<Value = Extension> {
    prop_oneof![
        (
            proptest::sample::select(vec![0, 43, 60, 135, 139, 140]),
            0..3_u8
        )
            .prop_map(|(kind, more)| {
                let mut bytes = vec![0; 8 + 8 * usize::from(more)];
                bytes[1] = more;
                Extension(kind, bytes)
            }),
        (1..4_u8).prop_map(|fours| {
            let mut bytes = vec![0; 8 + 4 * usize::from(fours)];
            bytes[1] = fours;
            Extension(51, bytes)
        }),
        proptest::sample::select(vec![0_u16, 0, 1, 0x80, 0x81]).prop_map(|offset| {
            let [high, low] = offset.to_be_bytes();
            Extension(44, vec![0, 0, high, low, 0, 0, 0, 9])
        }),
    ]
}

/// Frames of which the table may know the flow.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let tag = (0..3_usize, 0..3_u8).prop_map(|(kind, id)| {
        let [a, b] = [[0x81, 0], [0x88, 0xa8], [0x91, 0]][kind];
        [a, b, 0x60, id]
    });
    let payload = (
        proptest::sample::select(vec![1, 6, 17, 47, 58, 132]),
        proptest::sample::select(vec![0_u8, 3, 8, 128, 129, 135]),
        any::<[u8; 7]>(),
    )
        .prop_map(|(protocol, first, rest)| {
            let payload = [&[first][..], &rest, &[0; 32]].concat();
            (protocol, payload)
        });
    let v4 = (
        0..4_u8,
        proptest::sample::select(vec![0_u16, 0x4000, 0x2000, 5]),
        payload.clone(),
    )
        .prop_map(|(options, fragment, (protocol, payload))| {
            let mut packet = vec![0x45 + options, 0, 0, 60 + 4 * options, 0, 0];
            packet.extend(fragment.to_be_bytes());
            packet.extend([64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
            packet.extend(vec![1; 4 * usize::from(options)]);
            packet.extend(payload);
            ([8, 0], packet)
        });
    let v6 = (proptest::collection::vec(extension(), 0..10), payload).prop_map(
        |(extensions, (protocol, payload))| {
            let kinds = extensions.iter().map(|extension| extension.0);
            let mut kinds = kinds.chain([protocol]);
            let mut packet = vec![0x60, 0, 0, 0, 0, 0, kinds.next().unwrap(), 64];
            packet.extend([[0xfd, 1, 2, 3].repeat(4), [0xfd, 4, 5, 6].repeat(4)].concat());
            for (extension, kind) in extensions.iter().zip(kinds) {
                packet.push(kind);
                packet.extend(&extension.1[1..]);
            }
            packet.extend(payload);
            ([0x86, 0xdd], packet)
        },
    );
    (proptest::collection::vec(tag, 0..4), prop_oneof![v4, v6]).prop_map(
        |(tags, (ether_type, packet))| {
            let mut frame = ethernet(&tags, ether_type);
            frame.extend(packet);
            frame
        },
    )
}

#[test]
fn the_program_names_flows_as_the_table_does() {
    let tap = Tap::new(4);
    let steering = TapSteering::new(PairCount(4)).unwrap();
    steering.attach(tap.queues[0].as_fd()).unwrap();
    let mut runner = TestRunner::new(ProptestConfig::with_cases(1000));
    let result = runner.run(&frames(), |frame| {
        match parse(&frame).flow {
            Some(flow) => {
                for queue in [3, 1] {
                    steering.steer(&flow, Some(PairId(queue))).unwrap();
                    prop_assert_eq!(tap.send(&frame), usize::from(queue), "{:?}", flow);
                }
                steering.steer(&flow, None).unwrap();
            }
            None => prop_assert_eq!(tap.send(&frame), 0),
        }
        Ok(())
    });
    result.unwrap();
}

#[test]
fn flows_that_are_forgotten_go_where_they_went_before_they_were_steered() {
    let tap = Tap::new(4);
    let steering = TapSteering::new(PairCount(4)).unwrap();
    steering.attach(tap.queues[0].as_fd()).unwrap();
    steering.forget().unwrap();
    let frames: Vec<_> = (0..300).map(|port| ipv4(&[], 0, 17, port)).collect();
    let before: Vec<_> = frames.iter().map(|frame| tap.send(frame)).collect();
    for (frame, queue) in frames.iter().zip(&before) {
        let flow = parse(frame).flow.unwrap();
        let other = u16::try_from((queue + 1) % 4).unwrap();
        steering.steer(&flow, Some(PairId(other))).unwrap();
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
    let steering = TapSteering::new(PairCount(4)).unwrap();
    steering.attach(tap.queues[0].as_fd()).unwrap();
    let mut seen = [0; 4];
    for port in 0..400 {
        seen[tap.send(&ipv4(&[], 0, 17, port))] += 1;
    }
    assert!(seen.iter().all(|count| *count > 40), "{seen:?}");
    steering.set_queues(PairCount(2)).unwrap();
    for port in 0..100 {
        assert!(tap.send(&ipv6(6, port)) < 2);
    }
    // So do flows that are steered to a queue that is not in use, until it is again.
    let flow = parse(&ipv6(6, 1)).flow.unwrap();
    for queue in [1, 3] {
        steering.steer(&flow, Some(PairId(queue))).unwrap();
        let unused = queue > 1;
        let at = tap.send(&ipv6(6, 1));
        assert!(if unused {
            at < 2
        } else {
            at == usize::from(queue)
        });
    }
    steering.set_queues(PairCount(4)).unwrap();
    assert_eq!(tap.send(&ipv6(6, 1)), 3);
    // What is no IP goes to the first.
    let mut arp = ethernet(&[], [8, 6]);
    arp.extend([0; 46]);
    assert_eq!(tap.send(&arp), 0);
    detach(tap.queues[0].as_fd()).unwrap();
}
