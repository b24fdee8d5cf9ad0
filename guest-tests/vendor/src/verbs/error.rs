//! Errors of RDMA, each with the call or number that is at fault.

use std::io;

/// Reason why a call of a verbs library, or a request to a device, failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message beside each field is its documentation")]
pub enum VerbsError {
    /// A library lacks a function.
    #[error("{library} has no {symbol}: a later rdma-core is needed (44 for all but Data Direct)")]
    Symbol { library: &'static str, symbol: &'static str },
    #[error("{call}: {source}")]
    Call { call: &'static str, source: io::Error },
    /// This device's driver has no such function.
    #[error("the library of this device has no {call}")]
    NoCall { call: &'static str },
    /// The library or a peer returned an impossible number.
    #[error("{what} is {value:#x}, {rule}")]
    Bound {
        /// Name of the number.
        what: &'static str,
        value: u64,
        /// The rule that it breaks.
        rule: &'static str,
    },
    /// There is no GID, hence no address, at a port.
    #[error("port {port} has no usable GID: give its interface an address")]
    NoGid {
        /// Number of the port, from 1.
        port: u8,
    },
    /// A request was not carried out.
    #[error("request {id:#x} ended with status {status} ({name}), vendor's error {vendor:#x}{hint}")]
    Work {
        /// Id of the request.
        id: u64,
        /// Value of `enum ibv_wc_status`, never 0 (success).
        status: u32,
        name: &'static str,
        /// The driver's own number.
        vendor: u32,
        hint: &'static str,
    },
    #[error("no completion within {seconds} s")]
    Silent {
        /// Time limit that passed, in whole seconds.
        seconds: u64,
    },
}

impl VerbsError {
    /// A call that failed with an error number.
    pub(crate) fn call(call: &'static str, number: i32) -> Self {
        Self::Call { call, source: io::Error::from_raw_os_error(number) }
    }

    /// A call that failed and left its number in `errno`.
    pub(crate) fn last(call: &'static str) -> Self {
        Self::Call { call, source: io::Error::last_os_error() }
    }

    /// The error number of a failed call.
    #[must_use]
    pub fn number(&self) -> Option<i32> {
        match self {
            Self::Call { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// Names of `enum ibv_wc_status`, by number.
const STATUS: [&str; 24] = [
    "success",
    "local length error",
    "local queue pair operation error",
    "local EE context operation error",
    "local protection error",
    "work request flushed",
    "memory window bind error",
    "bad response",
    "local access error",
    "remote invalid request",
    "remote access error",
    "remote operation error",
    "transport retry counter exceeded",
    "receiver-not-ready retry counter exceeded",
    "local RDD violation",
    "remote invalid read request",
    "remote aborted",
    "invalid EE context number",
    "invalid EE context state",
    "fatal error",
    "response timeout",
    "general error",
    "tag matching error",
    "tag matching rendezvous incomplete",
];

/// The name of a status, of any number.
pub(crate) fn status_name(status: u32) -> &'static str {
    usize::try_from(status).ok().and_then(|at| STATUS.get(at)).copied().unwrap_or("no status that is known")
}

/// The usual cause of a status.
pub(crate) const fn status_hint(status: u32) -> &'static str {
    match status {
        4 => "; with a device's memory behind it, ACS or a missing IOMMU mapping",
        10 => "; the key or the range is not the other side's",
        12 => "; the other side cannot be reached: addresses, MTU, UDP port 4791",
        13 => "; the other side has posted no receive",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_a_name_and_others_too() {
        assert_eq!(status_name(4), "local protection error");
        assert_eq!(status_name(12), "transport retry counter exceeded");
        assert_eq!(status_name(23), "tag matching rendezvous incomplete");
        assert_eq!(status_name(u32::MAX), "no status that is known");
        assert!(status_hint(4).contains("ACS") && status_hint(99).is_empty());
    }
}
