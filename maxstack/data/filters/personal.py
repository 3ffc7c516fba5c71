"""Masks for personal data. A regular expression finds what looks like an address or a number; a
library decides by check digits, networks and numbering plans."""

import ipaddress
import re
from collections.abc import Callable

from maxstack.data.filters.filter import Filter, kind, missing_package
from maxstack.errors import ConfigError
from maxstack.schema.filters import PersonalDataFilter

# Letters of scripts that are written without spaces end what stands beside them, as `_` does.
_LETTER = "A-Za-z0-9\u00c0-\u052f"
_BEFORE, _AFTER = "(?<![A-Za-z0-9{}])", "(?![A-Za-z0-9{}])"
_EMAIL = re.compile(
    rf"(?<![{_LETTER}._%+-])[{_LETTER}._%+-]{{1,64}}@(?:[{_LETTER}-]{{1,63}}\.)+[A-Za-z]{{2,24}}"
    + _AFTER.format("-")
)
_IPV4 = r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![0-9A-Za-z]|\.[0-9])"
_GROUP = "[0-9A-Fa-f]"
_IP = re.compile(
    _BEFORE.format(".") + rf"(?:{_IPV4}|(?=::|{_GROUP})(?:{_GROUP}{{0,4}}:){{2,7}}"
    rf"(?:{_IPV4}|(?:{_GROUP}{{1,4}}|(?<=::))(?![0-9A-Za-z]|:[0-9A-Fa-f:])))"
)
_IBAN = re.compile(
    _BEFORE.format("")
    + "[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?"
    + _AFTER.format("")
)
_CARD = re.compile(_BEFORE.format("-") + "(?:[0-9][ -]?){12,18}[0-9]" + _AFTER.format("-"))
_DIGITS = re.compile(r"\d(?:[^\w+]*\d){5}")
"""A pattern that every phone number matches: the library is slow, so only such texts go to it."""
_ISSUER = re.compile(r"4|5[1-5]|2[2-7]|3[4-9]|6|8[16]")


@kind(PersonalDataFilter)
class PersonalData(Filter):
    """Replace each kind of data by its placeholder."""

    def __init__(self, cfg: PersonalDataFilter):
        self._cfg = cfg
        try:
            import phonenumbers
            from stdnum import iban, luhn
        except ImportError as error:
            raise missing_package("phonenumberslite or python-stdnum", "pii", error) from error
        self._phonenumbers = phonenumbers
        if unknown := {*cfg.phone_regions} - {*phonenumbers.SUPPORTED_REGIONS}:
            raise ConfigError(
                f"data.steps: pii.phone_regions: {', '.join(sorted(unknown))}: phonenumbers knows "
                "no such country; use codes of ISO 3166, as in [US, CH]"
            )
        masks: list[tuple[str | None, re.Pattern[str], Callable[[str], bool]]] = [
            (cfg.email, _EMAIL, bool),
            (cfg.ip, _IP, _is_public),
            (cfg.iban, _IBAN, iban.is_valid),
            (cfg.credit_card, _CARD, lambda text: _is_card(text, luhn.is_valid)),
        ]
        self._masks = [(mask, pattern, test) for mask, pattern, test in masks if mask is not None]

    def __call__(self, text: str) -> str:
        for mask, pattern, test in self._masks:
            text = pattern.sub(_masked(mask, test), text)
        # The library reads 0.6 MB/s where words hold digits, so it is asked only if a number is
        # possible.
        if self._cfg.phone is not None and _DIGITS.search(text):
            # Without a country only numbers with + can be told.
            regions = self._cfg.phone_regions or (None,) * ("+" in text or "\uff0b" in text)
            for region in regions:
                text = self._without_phones(text, region)
        return text

    def _without_phones(self, text: str, region: str | None) -> str:
        parts: list[str] = []
        done, mask = 0, self._cfg.phone or ""
        for match in self._phonenumbers.PhoneNumberMatcher(text, region):
            parts += [text[done : match.start], mask]
            done = match.end
        return "".join([*parts, text[done:]])


def _masked(mask: str, test: Callable[[str], bool]) -> Callable[[re.Match[str]], str]:
    return lambda found: mask if test(found[0]) else found[0]


def _is_public(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
        # ::ffff:10.0.0.1 is as private as 10.0.0.1.
        return (getattr(address, "ipv4_mapped", None) or address).is_global
    except ValueError:
        return False


def _is_card(text: str, has_check_digit: Callable[[str], bool]) -> bool:
    digits = re.sub(r"\D", "", text)
    # One number in ten has a right check digit by chance, so the issuer's digits must fit too.
    return bool(_ISSUER.match(digits)) and has_check_digit(digits)
