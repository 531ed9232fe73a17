use super::*;
use crate::bits::attribute;
use proptest::prelude::*;
use proptest::strategy::BoxedStrategy;

fn private_data<const BYTES: usize>() -> impl Strategy<Value = PrivateData<BYTES>> {
    prop::collection::vec(any::<u8>(), 0..=BYTES).prop_map(|data| PrivateData::new(&data).unwrap())
}

fn ids() -> impl Strategy<Value = (CommId, CommId)> {
    any::<(u32, u32)>().prop_map(|(local, remote)| (CommId(local), CommId(remote)))
}

fn info() -> impl Strategy<Value = AdditionalInfo> {
    prop::collection::vec(any::<u8>(), 0..=72).prop_map(|info| AdditionalInfo::new(&info).unwrap())
}

fn about() -> impl Strategy<Value = About> {
    prop::sample::select(vec![About::Req, About::Rep, About::Other])
}

fn path() -> impl Strategy<Value = Path> {
    let addresses = any::<(u16, u16, [u8; 16], [u8; 16])>();
    let rest = any::<(u32, u8, u8, u8, u8, bool, u8)>();
    (addresses, rest).prop_map(|((local_lid, remote_lid, local, remote), rest)| {
        let (label, rate, traffic_class, hop_limit, level, subnet_local, timeout) = rest;
        Path {
            local_lid,
            remote_lid,
            local_gid: Gid(local),
            remote_gid: Gid(remote),
            flow_label: FlowLabel::of(label),
            packet_rate: PacketRate::of(rate),
            traffic_class,
            hop_limit,
            service_level: ServiceLevel::of(level),
            subnet_local,
            ack_timeout: TimeExponent::of(timeout),
        }
    })
}

fn req() -> impl Strategy<Value = Message> {
    let names = any::<(u32, u64, u64, u32, u32, u32)>();
    let bytes = any::<[u8; 8]>();
    let flags = any::<(bool, bool, u16)>();
    let mtu = (1..=5u8).prop_map(|number| PathMtu::new(number).unwrap());
    let transport = prop::sample::select(vec![
        Transport::Reliable,
        Transport::Unreliable,
        Transport::ExtendedReliable,
    ]);
    let paths = (path(), prop::option::of(path()));
    let data = private_data::<92>();
    (names, bytes, flags, mtu, transport, paths, data).prop_map(
        |(names, bytes, flags, path_mtu, transport, (primary, alternate), private_data)| {
            let (comm_id, service, guid, local_q_key, qpn, psn) = names;
            let [resources, depth, remote, local, retries, rnr, cm, _] = bytes;
            let (end_to_end_flow_control, srq, partition_key) = flags;
            let is_one = |path: &Path| path.local_lid != 0 || path.local_gid != Gid::default();
            Message::Req(Box::new(Req {
                local_comm_id: CommId(comm_id),
                service_id: ServiceId(service),
                local_ca_guid: Guid(guid),
                local_q_key,
                local_qpn: Qpn::of(qpn),
                responder_resources: resources,
                initiator_depth: depth,
                remote_cm_response_timeout: TimeExponent::of(remote),
                transport,
                end_to_end_flow_control,
                starting_psn: Psn::of(psn),
                local_cm_response_timeout: TimeExponent::of(local),
                retry_count: RetryCount::of(retries),
                partition_key,
                path_mtu,
                rnr_retry_count: RetryCount::of(rnr),
                max_cm_retries: CmRetries::of(cm),
                srq,
                primary,
                alternate: alternate.filter(is_one),
                private_data,
            }))
        },
    )
}

fn rep() -> impl Strategy<Value = Message> {
    let numbers = any::<(u32, u32, u32, u32, u64)>();
    (
        ids(),
        numbers,
        any::<[u8; 5]>(),
        any::<[bool; 2]>(),
        private_data(),
    )
        .prop_map(
            |((local_comm_id, remote_comm_id), numbers, bytes, [flow, srq], private_data)| {
                let (local_q_key, qpn, eecn, psn, guid) = numbers;
                let [responder_resources, initiator_depth, delay, failover, rnr] = bytes;
                Message::Rep(Rep {
                    local_comm_id,
                    remote_comm_id,
                    local_q_key,
                    local_qpn: Qpn::of(qpn),
                    local_eecn: Qpn::of(eecn),
                    starting_psn: Psn::of(psn),
                    responder_resources,
                    initiator_depth,
                    target_ack_delay: TimeExponent::of(delay),
                    failover: Failover::of(failover),
                    end_to_end_flow_control: flow,
                    rnr_retry_count: RetryCount::of(rnr),
                    srq,
                    local_ca_guid: Guid(guid),
                    private_data,
                })
            },
        )
}

fn acknowledgement() -> impl Strategy<Value = Message> {
    (ids(), about(), any::<u8>(), private_data()).prop_map(
        |((local_comm_id, remote_comm_id), about, timeout, private_data)| {
            Message::Mra(Mra {
                local_comm_id,
                remote_comm_id,
                about,
                service_timeout: TimeExponent::of(timeout),
                private_data,
            })
        },
    )
}

fn rejection() -> impl Strategy<Value = Message> {
    (ids(), about(), any::<u16>(), info(), private_data()).prop_map(
        |((local_comm_id, remote_comm_id), about, reason, info, private_data)| {
            Message::Rej(Rej {
                local_comm_id,
                remote_comm_id,
                about,
                reason: RejectReason(reason),
                info,
                private_data,
            })
        },
    )
}

fn disconnection() -> impl Strategy<Value = Message> {
    (ids(), any::<u32>(), private_data()).prop_map(
        |((local_comm_id, remote_comm_id), qpn, private_data)| {
            Message::Dreq(Dreq {
                local_comm_id,
                remote_comm_id,
                remote_qpn: Qpn::of(qpn),
                private_data,
            })
        },
    )
}

fn ready_or_disconnected() -> impl Strategy<Value = Message> {
    (ids(), any::<bool>(), private_data()).prop_map(
        |((local_comm_id, remote_comm_id), is_ready, private_data)| {
            if is_ready {
                Message::Rtu(Rtu {
                    local_comm_id,
                    remote_comm_id,
                    private_data,
                })
            } else {
                Message::Drep(Drep {
                    local_comm_id,
                    remote_comm_id,
                    private_data,
                })
            }
        },
    )
}

fn datagram_service() -> BoxedStrategy<Message> {
    let request = (any::<(u32, u16, u64)>(), private_data()).prop_map(
        |((request_id, partition_key, service), private_data)| {
            Message::SidrReq(SidrReq {
                request_id: CommId(request_id),
                partition_key,
                service_id: ServiceId(service),
                private_data,
            })
        },
    );
    let reply = (any::<(u32, u8, u32, u64, u32)>(), info(), private_data()).prop_map(
        |((request_id, status, qpn, service, q_key), info, private_data)| {
            Message::SidrRep(SidrRep {
                request_id: CommId(request_id),
                status: SidrStatus(status),
                qpn: Qpn::of(qpn),
                service_id: ServiceId(service),
                q_key,
                info,
                private_data,
            })
        },
    );
    prop_oneof![request, reply].boxed()
}

fn message() -> impl Strategy<Value = Message> {
    prop_oneof![
        req(),
        rep(),
        acknowledgement(),
        rejection(),
        disconnection(),
        ready_or_disconnected(),
        datagram_service(),
    ]
}

/// A datagram of the class, with this attribute and whatever else.
fn of_the_class(mut datagram: Datagram, attribute: u16) -> Datagram {
    datagram[..4].copy_from_slice(&[1, 7, 2, 3]);
    datagram[16..18].copy_from_slice(&attribute.to_be_bytes());
    datagram
}

proptest! {
    #[test]
    fn a_message_comes_back(transaction: u64, message in message()) {
        let mad = Mad { transaction: TransactionId(transaction), message };
        prop_assert_eq!(Mad::parse(&mad.write()), Ok(mad));
    }

    #[test]
    fn bytes_of_a_peer_are_one_message_or_none(
        bytes in prop::collection::vec(any::<u8>(), MAD_BYTES),
        attribute in 0x0e..=0x1au16,
    ) {
        let datagram: Datagram = bytes.try_into().unwrap();
        prop_assert!(Mad::parse(&datagram).is_err());
        match Mad::parse(&of_the_class(datagram, attribute)) {
            Ok(mad) => prop_assert_eq!(Mad::parse(&mad.write()), Ok(mad)),
            Err(ParseError::Refused(_)) => prop_assert_eq!(attribute, attribute::REQ),
            Err(ParseError::Malformed(error)) => {
                let expected = match error {
                    Malformed::Attribute(number) => number == attribute,
                    Malformed::About(number) => {
                        number == 3 && [attribute::MRA, attribute::REJ].contains(&attribute)
                    }
                    Malformed::InfoLength(length) => {
                        length > 72 && [attribute::REJ, attribute::SIDR_REP].contains(&attribute)
                    }
                    _ => false,
                };
                prop_assert!(expected, "{error}");
            }
        }
    }

    #[test]
    fn a_datagram_has_256_bytes(length in (0..600usize).prop_filter("not 256", |n| *n != 256)) {
        let bytes = vec![1; length];
        prop_assert_eq!(Mad::parse(&bytes), Err(Malformed::Length(length).into()));
    }
}

/// Bytes at their offsets in the tables of the specification, behind the header of 24.
fn at(attribute: u16, fields: &[(usize, &[u8])]) -> Datagram {
    let mut datagram = of_the_class([0; MAD_BYTES], attribute);
    datagram[8..16].copy_from_slice(&0x0102_0304_0506_0708_u64.to_be_bytes());
    for (offset, bytes) in fields {
        datagram[24 + offset..][..bytes.len()].copy_from_slice(bytes);
    }
    datagram
}

fn same(datagram: &Datagram, message: Message) {
    let mad = Mad {
        transaction: TransactionId(0x0102_0304_0506_0708),
        message,
    };
    assert_eq!(Mad::parse(datagram), Ok(mad.clone()));
    assert_eq!(&mad.write(), datagram);
}

#[test]
fn a_request_has_its_fields_where_table_106_has_them() {
    let datagram = at(
        attribute::REQ,
        &[
            (0, &[0xa1, 0xa2, 0xa3, 0xa4]),
            (8, &[0, 0, 0, 0, 1, 6, 0x1c, 0x06]),
            (16, &[9, 8, 7, 6, 5, 4, 3, 2]),
            (28, &[1, 2, 3, 4]),
            (32, &[0xb1, 0xb2, 0xb3, 17]),
            (39, &[18]),
            (43, &[20 << 3 | 1]),
            (44, &[0xc1, 0xc2, 0xc3, 19 << 3 | 6]),
            (48, &[0xff, 0xff, 3 << 4 | 7, 15 << 4 | 8]),
            (52, &[0xff, 0xfe, 0xff, 0xfd]),
            (56, &[0x11; 16]),
            (72, &[0x22; 16]),
            (88, &[0xfe, 0xdc, 0xb0, 0x12, 0x77, 64, 5 << 4 | 8, 14 << 3]),
            (140, &[0x33; 92]),
        ],
    );
    let primary = Path {
        local_lid: 0xfffe,
        remote_lid: 0xfffd,
        local_gid: Gid([0x11; 16]),
        remote_gid: Gid([0x22; 16]),
        flow_label: FlowLabel::of(0xfedcb),
        packet_rate: PacketRate::of(0x12),
        traffic_class: 0x77,
        hop_limit: 64,
        service_level: ServiceLevel::of(5),
        subnet_local: true,
        ack_timeout: TimeExponent::of(14),
    };
    let req = Req {
        local_comm_id: CommId(0xa1a2_a3a4),
        service_id: ServiceId(0x0106_1c06),
        local_ca_guid: Guid(0x0908_0706_0504_0302),
        local_q_key: 0x0102_0304,
        local_qpn: Qpn::of(0xb1_b2b3),
        responder_resources: 17,
        initiator_depth: 18,
        remote_cm_response_timeout: TimeExponent::of(20),
        transport: Transport::Reliable,
        end_to_end_flow_control: true,
        starting_psn: Psn::of(0xc1_c2c3),
        local_cm_response_timeout: TimeExponent::of(19),
        retry_count: RetryCount::of(6),
        partition_key: 0xffff,
        path_mtu: PathMtu::Bytes1024,
        rnr_retry_count: RetryCount::of(7),
        max_cm_retries: CmRetries::of(15),
        srq: true,
        primary,
        alternate: None,
        private_data: PrivateData([0x33; 92]),
    };
    same(&datagram, Message::Req(Box::new(req.clone())));

    let with = |fields: &[(usize, &[u8])]| {
        let mut datagram = datagram;
        for (offset, bytes) in fields {
            datagram[24 + offset..][..bytes.len()].copy_from_slice(bytes);
        }
        Mad::parse(&datagram)
    };
    let reason = |parsed| match parsed {
        Err(ParseError::Refused(refusal)) => {
            assert_eq!(refusal.comm_id, req.local_comm_id);
            assert_eq!(refusal.transaction, TransactionId(0x0102_0304_0506_0708));
            refusal.reason
        }
        other => panic!("{other:?}"),
    };
    // Reliable datagrams, and an extended transport that there is not.
    let transport = RejectReason::INVALID_TRANSPORT_TYPE;
    assert_eq!(reason(with(&[(43, &[20 << 3 | 2 << 1])])), transport);
    assert_eq!(reason(with(&[(43, &[20 << 3 | 3 << 1])])), transport);
    for mtu in [0, 6, 15] {
        assert_eq!(
            reason(with(&[(50, &[mtu << 4])])),
            RejectReason::INVALID_MTU
        );
    }
    let other_version = |attribute: u16| {
        let mut datagram = datagram;
        datagram[2] = 3;
        datagram[16..18].copy_from_slice(&attribute.to_be_bytes());
        Mad::parse(&datagram)
    };
    let version = RejectReason::INVALID_CLASS_VERSION;
    assert_eq!(reason(other_version(attribute::REQ)), version);
    let dropped = Err(Malformed::ClassVersion(3).into());
    assert_eq!(other_version(attribute::DREQ), dropped);

    let extended = with(&[(43, &[20 << 3 | 3 << 1]), (51, &[1])]).unwrap();
    let alternate = with(&[(96, &[0, 1])]).unwrap();
    for (mad, transport, has_alternate) in [
        (extended, Transport::ExtendedReliable, false),
        (alternate, Transport::Reliable, true),
    ] {
        let Message::Req(req) = mad.message else {
            panic!("{mad:?}");
        };
        assert_eq!(req.transport, transport);
        assert_eq!(req.alternate.is_some(), has_alternate);
    }
}

#[test]
fn a_reply_has_its_fields_where_table_110_has_them() {
    let datagram = at(
        attribute::REP,
        &[
            (0, &[0xa1, 0xa2, 0xa3, 0xa4, 0xb1, 0xb2, 0xb3, 0xb4]),
            (8, &[1, 2, 3, 4, 0xc1, 0xc2, 0xc3]),
            (16, &[0xd1, 0xd2, 0xd3, 0, 0xe1, 0xe2, 0xe3]),
            (24, &[5, 6, 7 << 3 | 2 << 1 | 1, 7 << 5 | 0x10]),
            (28, &[9, 8, 7, 6, 5, 4, 3, 2]),
            (36, &[0x44; 196]),
        ],
    );
    let rep = Rep {
        local_comm_id: CommId(0xa1a2_a3a4),
        remote_comm_id: CommId(0xb1b2_b3b4),
        local_q_key: 0x0102_0304,
        local_qpn: Qpn::of(0xc1_c2c3),
        local_eecn: Qpn::of(0xd1_d2d3),
        starting_psn: Psn::of(0xe1_e2e3),
        responder_resources: 5,
        initiator_depth: 6,
        target_ack_delay: TimeExponent::of(7),
        failover: Failover::of(2),
        end_to_end_flow_control: true,
        rnr_retry_count: RetryCount::of(7),
        srq: true,
        local_ca_guid: Guid(0x0908_0706_0504_0302),
        private_data: PrivateData([0x44; 196]),
    };
    same(&datagram, Message::Rep(rep));
}

#[test]
fn other_messages_have_their_fields_where_the_tables_have_them() {
    let ids: (usize, &[u8]) = (0, &[0xa1, 0xa2, 0xa3, 0xa4, 0xb1, 0xb2, 0xb3, 0xb4]);
    let (local_comm_id, remote_comm_id) = (CommId(0xa1a2_a3a4), CommId(0xb1b2_b3b4));
    same(
        &at(
            attribute::MRA,
            &[ids, (8, &[1 << 6, 24 << 3]), (10, &[5; 222])],
        ),
        Message::Mra(Mra {
            local_comm_id,
            remote_comm_id,
            about: About::Rep,
            service_timeout: TimeExponent::of(24),
            private_data: PrivateData([5; 222]),
        }),
    );
    let fields: [(usize, &[u8]); 4] = [
        ids,
        (8, &[2 << 6, 72 << 1, 0, 28]),
        (12, &[6; 72]),
        (84, &[7; 148]),
    ];
    same(
        &at(attribute::REJ, &fields),
        Message::Rej(Rej {
            local_comm_id,
            remote_comm_id,
            about: About::Other,
            reason: RejectReason::CONSUMER_DEFINED,
            info: AdditionalInfo::new(&[6; 72]).unwrap(),
            private_data: PrivateData([7; 148]),
        }),
    );
    same(
        &at(attribute::RTU, &[ids, (8, &[8; 224])]),
        Message::Rtu(Rtu {
            local_comm_id,
            remote_comm_id,
            private_data: PrivateData([8; 224]),
        }),
    );
    same(
        &at(
            attribute::DREQ,
            &[ids, (8, &[0xc1, 0xc2, 0xc3]), (12, &[9; 220])],
        ),
        Message::Dreq(Dreq {
            local_comm_id,
            remote_comm_id,
            remote_qpn: Qpn::of(0xc1_c2c3),
            private_data: PrivateData([9; 220]),
        }),
    );
    same(
        &at(attribute::DREP, &[ids, (8, &[10; 224])]),
        Message::Drep(Drep {
            local_comm_id,
            remote_comm_id,
            private_data: PrivateData([10; 224]),
        }),
    );
}

#[test]
fn messages_of_datagram_services_have_their_fields_where_the_tables_have_them() {
    let service: &[u8] = &[0, 0, 0, 0, 1, 0x11, 0, 9];
    let request: [(usize, &[u8]); 3] = [
        (0, &[0xa1, 0xa2, 0xa3, 0xa4, 0xff, 0xff]),
        (8, service),
        (16, &[3; 216]),
    ];
    same(
        &at(attribute::SIDR_REQ, &request),
        Message::SidrReq(SidrReq {
            request_id: CommId(0xa1a2_a3a4),
            partition_key: 0xffff,
            service_id: ServiceId(0x0111_0009),
            private_data: PrivateData([3; 216]),
        }),
    );
    let reply: [(usize, &[u8]); 6] = [
        (0, &[0xa1, 0xa2, 0xa3, 0xa4, 3, 2]),
        (8, &[0xc1, 0xc2, 0xc3]),
        (12, service),
        (20, &[1, 2, 3, 4]),
        (24, &[5, 6]),
        (96, &[4; 136]),
    ];
    same(
        &at(attribute::SIDR_REP, &reply),
        Message::SidrRep(SidrRep {
            request_id: CommId(0xa1a2_a3a4),
            status: SidrStatus::NO_QP,
            qpn: Qpn::of(0xc1_c2c3),
            service_id: ServiceId(0x0111_0009),
            q_key: 0x0102_0304,
            info: AdditionalInfo::new(&[5, 6]).unwrap(),
            private_data: PrivateData([4; 136]),
        }),
    );
}
