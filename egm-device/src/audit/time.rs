//! Points in time as RFC 3339 writes them, in UTC and with milliseconds: such texts sort as the times do.
#![forbid(unsafe_code)]

use std::time::{Duration, SystemTime};

/// Seconds of a day.
const DAY: u64 = 86_400;

/// `time` as in `2026-11-23T08:47:35.120Z`; a time before 1970 counts as 1970.
#[must_use]
pub fn format(time: SystemTime) -> String {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (seconds, milliseconds) = (since.as_secs(), since.subsec_millis());
    let (year, month, day) = civil(seconds / DAY);
    let (hour, minute, second) = (seconds % DAY / 3600, seconds % 3600 / 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milliseconds:03}Z")
}

/// Year, month and day of the day that begins `days` days after 1970-01-01: the Gregorian calendar counted in years that
/// begin in March, so that the leap day is the last.
const fn civil(days: u64) -> (u64, u64, u64) {
    let days = days.saturating_add(719_468); // since 0000-03-01
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era.saturating_mul(400).saturating_add(year_of_era);
    (if month <= 2 { year.saturating_add(1) } else { year }, month, day)
}

/// The earliest line that `text` means, as the start of a formatted time: a date, a date with a time of day in UTC, or how
/// long before `now` (`90s`, `15min`, `2h`, `7d`).
pub(crate) fn parse_since(text: &str, now: SystemTime) -> Result<String, String> {
    if let Some(ago) = ago(text) {
        return Ok(format(now.checked_sub(ago).unwrap_or(SystemTime::UNIX_EPOCH)));
    }
    let pattern = b"dddd-dd-ddTdd:dd:dd.dddZ";
    let text = text.replace(' ', "T");
    let is_whole = matches!(text.len(), 10 | 13 | 16 | 19 | 20 | 23 | 24);
    let bare = text.strip_suffix('Z').unwrap_or(&text);
    if is_whole && bare.bytes().zip(pattern).all(|(byte, like)| fits(byte, *like)) {
        return Ok(bare.to_owned());
    }
    Err("expected a time in UTC such as 2026-11-23 or 2026-11-23T08:47, or 90s, 15min, 2h, 7d".to_owned())
}

/// Whether `byte` fits the byte `like` of a pattern, in which `d` stands for a digit.
const fn fits(byte: u8, like: u8) -> bool {
    if like == b'd' { byte.is_ascii_digit() } else { byte == like }
}

fn ago(text: &str) -> Option<Duration> {
    let end = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at_checked(end)?;
    let unit = match unit {
        "s" => 1,
        "min" => 60,
        "h" => 3600,
        "d" => DAY,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64, milliseconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(seconds * 1000 + milliseconds)
    }

    #[test]
    fn times_are_those_of_date_1() {
        for (seconds, milliseconds, text) in [
            (0, 0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, 999, "2000-02-28T23:59:59.999Z"),
            (951_782_400, 0, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199, 5, "2024-02-29T23:59:59.005Z"),
            (1_795_423_655, 120, "2026-11-23T08:47:35.120Z"),
            (4_107_542_400, 0, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(format(at(seconds, milliseconds)), text);
        }
    }

    #[test]
    fn a_start_is_a_date_a_time_or_an_age() {
        let now = at(1_795_423_655, 120);
        for (text, since) in [
            ("2026-11-23", "2026-11-23"),
            ("2026-11-23T08:47", "2026-11-23T08:47"),
            ("2026-11-23 08:47:35Z", "2026-11-23T08:47:35"),
            ("90s", "2026-11-23T08:46:05.120Z"),
            ("2h", "2026-11-23T06:47:35.120Z"),
            ("7d", "2026-11-16T08:47:35.120Z"),
            ("99999999999d", "1970-01-01T00:00:00.000Z"),
        ] {
            assert_eq!(parse_since(text, now).as_deref(), Ok(since), "{text}");
        }
        for wrong in [
            "",
            "yesterday",
            "2026-11-2",
            "2026/11/23",
            "2h ",
            "5 d",
            "99999999999999999999d",
            "2026-11-23T08:47+01:00",
        ] {
            assert!(parse_since(wrong, now).is_err(), "{wrong}");
        }
    }
}
