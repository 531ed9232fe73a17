//! What both ends say of themselves when they negotiate the version.

use crate::{MAX_DMA_MAPS, MAX_MESSAGE_FDS, MAX_RECEIVED_FDS, MAX_TRANSFER_BYTES, PAGE_BYTES};
use farlane_abi::width::at_most;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a client's capabilities are refused.
#[derive(Debug, Error)]
pub enum CapabilitiesError {
    /// Not the JSON that the protocol describes.
    #[error("The capabilities are not what they should be")]
    Json(#[from] serde_json::Error),
    /// It cannot take any data.
    #[error("Transfers of {0} bytes are of no use")]
    Transfer(u64),
    /// It has none of the page sizes that this server has, all multiples of the smallest.
    #[error("Page sizes {0:#x} have none of {PAGE_BYTES:#x} or more")]
    PageSizes(u64),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct VersionData {
    capabilities: Option<Proposed>,
}

/// Members that are not listed are for others, as the protocol may grow.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Proposed {
    max_msg_fds: Option<u64>,
    max_data_xfer_size: Option<u64>,
    max_dma_maps: Option<u64>,
    pgsizes: Option<u64>,
    write_multiple: Option<bool>,
}

/// What a client has said of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Most descriptors that it takes in one message.
    pub max_msg_fds: usize,
    /// Most bytes of data in one message, what both ends take; not zero.
    pub max_transfer: u32,
    /// Most mappings at a time, what both ends allow.
    pub max_dma_maps: usize,
    /// It may send several writes in one message.
    pub write_multiple: bool,
}

impl Capabilities {
    /// Reads what a client proposes. No text at all stands for all defaults.
    ///
    /// # Errors
    /// See [`CapabilitiesError`].
    pub fn parse(text: &[u8]) -> Result<Self, CapabilitiesError> {
        let proposed = if text.is_empty() {
            Proposed::default()
        } else {
            let data: VersionData = serde_json::from_slice(text)?;
            data.capabilities.unwrap_or_default()
        };
        let transfer = proposed.max_data_xfer_size.unwrap_or(1 << 20);
        let max_transfer = at_most(transfer, MAX_TRANSFER_BYTES);
        if max_transfer == 0 {
            return Err(CapabilitiesError::Transfer(transfer));
        }
        let page_sizes = proposed.pgsizes.unwrap_or(PAGE_BYTES);
        if page_sizes < PAGE_BYTES {
            return Err(CapabilitiesError::PageSizes(page_sizes));
        }
        Ok(Self {
            max_msg_fds: at_most(proposed.max_msg_fds.unwrap_or(1), MAX_RECEIVED_FDS),
            max_transfer,
            max_dma_maps: at_most(proposed.max_dma_maps.unwrap_or(65535), MAX_DMA_MAPS),
            write_multiple: proposed.write_multiple.unwrap_or(false),
        })
    }

    /// What the server says of itself to this client, JSON text that ends with a zero byte.
    ///
    /// Limits are always stated: without them, the client would have to assume the protocol's
    /// defaults. What is not a limit is stated where the client has proposed it. There is no
    /// migration, and no second socket.
    ///
    /// # Errors
    /// None is known; JSON text of numbers can be made.
    pub fn answer(&self) -> Result<Vec<u8>, CapabilitiesError> {
        #[derive(Serialize)]
        struct Answer {
            capabilities: Stated,
        }
        #[derive(Serialize)]
        struct Stated {
            max_msg_fds: usize,
            max_data_xfer_size: u32,
            max_dma_maps: usize,
            pgsizes: u64,
            #[serde(skip_serializing_if = "Option::is_none")]
            write_multiple: Option<bool>,
        }
        let mut text = serde_json::to_vec(&Answer {
            capabilities: Stated {
                max_msg_fds: MAX_MESSAGE_FDS,
                max_data_xfer_size: MAX_TRANSFER_BYTES,
                max_dma_maps: self.max_dma_maps,
                pgsizes: PAGE_BYTES,
                write_multiple: self.write_multiple.then_some(true),
            },
        })?;
        text.push(0);
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_said_has_the_defaults_of_the_protocol() {
        let defaults = Capabilities {
            max_msg_fds: 1,
            max_transfer: MAX_TRANSFER_BYTES,
            max_dma_maps: MAX_DMA_MAPS,
            write_multiple: false,
        };
        for text in ["", "{}", r#"{"capabilities":{}}"#, r#"{"other":[1]}"#] {
            assert_eq!(Capabilities::parse(text.as_bytes()).unwrap(), defaults);
        }
    }

    #[test]
    fn limits_are_the_lower_of_both() {
        let text = br#"{"capabilities":{"migration":{"pgsize":4096},"max_msg_fds":7,
            "max_data_xfer_size":4096,"max_dma_maps":3,"pgsizes":2097152,"write_multiple":true}}"#;
        let capabilities = Capabilities::parse(text).unwrap();
        assert_eq!(
            capabilities,
            Capabilities {
                max_msg_fds: 7,
                max_transfer: 4096,
                max_dma_maps: 3,
                write_multiple: true,
            }
        );
        let huge = br#"{"capabilities":{"max_msg_fds":18446744073709551615,
            "max_data_xfer_size":18446744073709551615,"max_dma_maps":18446744073709551615}}"#;
        let capabilities = Capabilities::parse(huge).unwrap();
        assert_eq!(capabilities.max_transfer, MAX_TRANSFER_BYTES);
        assert_eq!(capabilities.max_dma_maps, MAX_DMA_MAPS);
        assert_eq!(capabilities.max_msg_fds, crate::MAX_RECEIVED_FDS);
    }

    #[test]
    fn malformed_capabilities_are_refused() {
        for text in [
            "[",
            "3",
            "{}x",
            "{\"a\":\"\0\"}",
            r#"{"capabilities":7}"#,
            r#"{"capabilities":{"max_msg_fds":-1}}"#,
            r#"{"capabilities":{"max_msg_fds":"1"}}"#,
            r#"{"capabilities":{"max_data_xfer_size":0}}"#,
            r#"{"capabilities":{"max_data_xfer_size":1.5}}"#,
            r#"{"capabilities":{"pgsizes":0}}"#,
            r#"{"capabilities":{"pgsizes":2048}}"#,
            r#"{"capabilities":{"write_multiple":1}}"#,
            r#"{"capabilities":{"max_dma_maps":18446744073709551616}}"#,
        ] {
            assert!(Capabilities::parse(text.as_bytes()).is_err(), "{text}");
        }
        assert!(Capabilities::parse(&[b'['; 10_000]).is_err());
        assert!(Capabilities::parse(&[0xff, 0xfe]).is_err());
    }

    #[test]
    fn the_answer_offers_only_what_was_proposed() {
        let answer = |text: &[u8]| {
            let mut answer = Capabilities::parse(text).unwrap().answer().unwrap();
            assert_eq!(answer.pop(), Some(0));
            String::from_utf8(answer).unwrap()
        };
        assert!(!answer(b"").contains("write_multiple"));
        let multi = answer(br#"{"capabilities":{"write_multiple":true}}"#);
        assert!(multi.contains(r#""write_multiple":true"#));
        assert!(!multi.contains("migration"));
    }
}
