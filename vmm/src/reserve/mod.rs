//! What a machine reserves before anything is opened: slices, GPUs and connections to vfio-user servers. Side effects start
//! here.
//!
//! | file | content |
//! |---|---|
//! | `leases` | slices of the host's regions, granted and scrubbed; `broker`: slices from a broker; `granter`: slices for a machine that runs |
//! | `returns` | returns of slices; `record`: slices for the operator |
//! | `gpus` | claims on GPUs that reach a whole region |
//! | `servers` | vfio-user servers, connected |
//! | `close` | closes the files of slices once their memory is mapped |

mod broker;
mod close;
mod error;
mod gpus;
mod granter;
mod leases;
mod record;
mod returns;
mod servers;

pub use self::broker::Broker;
pub use self::error::{ReserveError, ServerError};
pub use self::gpus::claim_gpus;
pub(crate) use self::gpus::reached;
pub(crate) use self::granter::{GrantedMemory, Granter};
pub(crate) use self::leases::{ATTEMPTS, Taken};
pub use self::leases::{Leases, SliceProgress};
pub(crate) use self::record::SliceRecord;
pub(crate) use self::returns::Return;
pub use self::servers::Servers;
