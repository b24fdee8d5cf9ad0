//! What a reset by the guest does.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Effect of a reset that the guest requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnReset {
    /// The machine ends, with the reason "reset".
    #[default]
    Exit,
    /// The guest starts again in the same machine, which keeps its slices and devices.
    Reboot,
}

impl OnReset {
    /// Whether it is the default.
    pub fn is_exit(&self) -> bool {
        *self == Self::Exit
    }
}
