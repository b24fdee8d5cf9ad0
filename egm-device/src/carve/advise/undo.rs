//! Advice on how to give all of a host's memory back to its kernel.

use serde::Serialize;
use serde_json::json;

use crate::carve::advise::Setting;
use crate::region::words::{self, Effect};
use crate::region::{HostFacts, Region, RegionKind};

/// The changes that give all memory back to the kernel after a reboot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Undo {
    /// Words to take from the kernel's command line.
    pub remove: Vec<String>,
    /// Settings of the firmware.
    pub settings: Vec<Setting>,
    /// Commands to run, before the reboot if there is one.
    pub commands: Vec<String>,
    /// Regions to take from the host file.
    pub regions: Vec<String>,
}

impl Undo {
    /// Whether there are no changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it takes a reboot.
    #[must_use]
    pub(crate) fn needs_reboot(&self) -> bool {
        !self.remove.is_empty() || !self.settings.is_empty()
    }
}

/// The changes for the host that has these regions.
#[must_use]
pub fn undo(facts: &HostFacts, regions: &[Region]) -> Undo {
    let words = words::parse(&facts.command_line);
    let persistent = |word: &words::Word| word.effects.iter().any(|e| matches!(e, Effect::Persistent(_)));
    let made_by_word = words.iter().any(persistent);
    let mut undo = Undo { remove: words.into_iter().map(|word| word.text).collect(), ..Undo::default() };
    for region in regions {
        match &region.kind {
            RegionKind::Egm { .. } if undo.settings.is_empty() => undo.settings.push(Setting {
                form: "EGM".to_owned(),
                attribute: "EGM".to_owned(),
                value: json!(false),
            }),
            RegionKind::Reserved { .. } => undo.regions.push(region.name.clone()),
            // A device made by memmap= goes with the word; memory that the firmware set aside becomes RAM at once.
            RegionKind::Devdax { .. } if !made_by_word => {
                undo.commands.push(format!("daxctl reconfigure-device --mode=system-ram {}", region.name))
            }
            _ => {}
        }
    }
    undo
}
